"""The seams: what users are given, what the worker needs of a broker, and who may watch.

Protocols, where there is more than one implementation or its user is a room beside it, and the values that are
exchanged. Each contract is in the docstrings; `idemconsumer.testing` holds suites for brokers and request stores.
"""
