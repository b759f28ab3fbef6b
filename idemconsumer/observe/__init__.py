"""What is told about a running worker: log lines today.

Decides nothing.
"""
