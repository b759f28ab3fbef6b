"""Processes: one worker's life from signal to exit code, and the launcher that keeps several alive.

Knows a worker only as something that runs, drains and aborts.
"""
