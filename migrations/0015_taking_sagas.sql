-- Indexes for who takes which saga (L32). {schema} is the configured schema.

-- A saga that waits is in the one, a saga that is held in the other, and one that has ended in neither, so both are small.
-- They are made under a lock that lets steps begin, and that lasts as long as the sagas of the moment need: a second for
-- 300,000. `saga_due` stays, since workers of the version before may still run.
create index saga_waiting on {schema}.saga (handler, due) where worker is null and parked is null;
create index saga_held on {schema}.saga (worker, handler, due) where worker is not null;
