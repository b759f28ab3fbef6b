"""What a running worker reports: log lines, metrics, and whether it is alive.

Decides nothing.
"""
