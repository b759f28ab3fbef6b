"""The seams with more than one implementation: brokers, stores of requests, who may watch, who follows.

Protocols and the values that are exchanged. Each contract is in the docstrings; `idemconsumer.testing` holds suites for
brokers and request stores.
"""
