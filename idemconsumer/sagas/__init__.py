"""Sagas, leased mode: multi-step handlers that resume at their last recovery point, on any worker.

The path of a step, from the handler down: `users_saga`, `run`, `steps`, the store; the step itself is a value, in
`step`. The path of an attempt: `saga_engine`, `attempt`, `undo`, `saga_endings`. No SQL and no broker here; decisions
that need no clock, task or store are in `rules`.
"""
