"""Postgres as the implementation of the ports: claims, leases, checkpoints, the guard, and their connections.

Besides `admin`, the Postgres queue and retention, this is the only code that talks to the database. It does not know
the engine.
"""
