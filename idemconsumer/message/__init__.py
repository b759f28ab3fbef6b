"""A message and what is read from it: payload, key, tenant, fingerprint, headers, source.

Pure: no clock, no driver, no event loop. Knows nothing of records, handlers or brokers.
"""
