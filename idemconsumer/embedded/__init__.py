"""A throwaway Postgres for demos, development and tests: a real, local server that ends with its process.

Knows nothing of idemconsumer's tables.
"""
