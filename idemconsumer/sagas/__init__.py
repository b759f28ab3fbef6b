"""Sagas, leased mode: multi-step handlers that resume at their last recovery point, on any worker.

A step goes from the handler down: `run`, `steps`, the store. An attempt: `engine`, `attempt`, `undo`, `endings`. No SQL
and no broker here; what can be decided without a clock, a task or the store is in `rules`.
"""
