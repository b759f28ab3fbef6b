"""Data in Redis: requests whose effects are not in Postgres, and copies that save a query to Postgres.

The only folder that imports the client library. Each decision is one script on one key, by Redis's own clock. Nothing
here takes part in a transaction of Postgres.
"""
