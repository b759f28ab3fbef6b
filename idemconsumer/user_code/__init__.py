"""How a user's function is called: bounded in time, cancelled from outside only, and blamed for what it did.

The only room that knows how asyncio counts cancellations. Knows no store, no broker and no rule of a message.
"""
