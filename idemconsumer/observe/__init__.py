"""What a running worker reports: log lines, today.

Decides nothing.
"""
