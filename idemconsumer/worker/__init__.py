"""One worker process: feeds bring deliveries, lanes run them, a drain ends it in order.

Owns what the process has in hand. Decides nothing about a message: the engines and the rules do.
"""
