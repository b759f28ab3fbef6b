"""How a user's function is called: limited in time, cancelled only from outside, and blamed only for what it did.

Only this folder knows how asyncio counts cancellations. Knows no store, no broker and no rule of a message.
"""
