"""A throwaway Postgres for demos, development and tests: real, local, gone with its process.

Knows nothing of idemconsumer's tables.
"""
