-- An index of the sagas that wait, by version (L60). {schema} is the configured schema.

-- Made under the same lock as those of 0015, which stay: workers of the version before may still run.
create index saga_waiting_version on {schema}.saga (handler, coalesce(version, ''), due)
    where worker is null and parked is null;
