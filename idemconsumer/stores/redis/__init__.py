"""What is kept in Redis: requests whose effects are not in Postgres, and what spares Postgres a look.

The only folder that imports the client library. Each decision is one script on one key, by Redis's own clock. Nothing
here takes part in a transaction of Postgres.
"""
