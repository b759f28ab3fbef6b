"""Postgres behind the ports: claims, leases, checkpoints, the guard, and the connections they run on.

With `admin`, the Postgres queue and retention the only place that talks to the database. Knows no engine.
"""
