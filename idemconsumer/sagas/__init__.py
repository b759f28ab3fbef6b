"""Sagas: multi-step handlers that resume at their last recovery point, on any worker.

Leased mode: the claim commits first, steps are checkpointed one by one, and every write is fenced by a token.
"""
