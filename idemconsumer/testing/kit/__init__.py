"""The test kit: apps with a real Postgres and brokers in memory, inside the test's event loop. See `idem.Kit`."""
