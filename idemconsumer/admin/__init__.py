"""Queries and decisions of people about dead letters, sagas, keys and workers.

For the command line and for dashboards. Runs no handler.
"""
