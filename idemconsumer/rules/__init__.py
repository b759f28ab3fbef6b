"""The rules as pure functions: what a claim result means, what follows from an outcome, how large a group may be.

Time and chance come in as numbers. Nothing here imports a clock, an event loop, a driver or a log.
"""
