"""Postgres behind the ports: claims, leases, checkpoints, the guard, and the connections they run on.

The only room, with `admin` and the Postgres queue, that talks to the database. Knows no engine.
"""
