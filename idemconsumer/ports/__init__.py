"""The seams: what the engines need of a store, what the worker needs of a broker, and who may watch.

Protocols and the values that they exchange. Each contract is in the docstrings; `idemconsumer.testing` holds a
suite that every implementation must pass. Nothing here is implemented.
"""
