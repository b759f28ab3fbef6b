"""What a running worker reports: log lines, numbers, and whether it is alive.

Decides nothing.
"""
