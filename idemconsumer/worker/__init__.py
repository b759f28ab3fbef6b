"""One worker process: feeds bring deliveries, lanes run them, a drain ends it in order.

Keeps the messages that the process has in flight. Decides nothing about a message: the engines and the rules do.
"""
