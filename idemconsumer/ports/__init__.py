"""The interfaces with more than one implementation: brokers, stores of requests, observers, tracing.

Protocols and the values that are exchanged. Each contract is in the docstrings; `idemconsumer.testing` holds suites for
brokers and request stores.
"""
