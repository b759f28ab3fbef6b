-- Which sagas may have killed a worker (L22). {schema} is the configured schema.

-- 0: none has died. 1: one has died, beside others, since the last finished step. 2: so has the next one; the saga runs
-- while nothing else of its process does. 3: it does so now, and if that worker dies, it is an attempt of the saga.
-- Workers of earlier versions leave this as it is, and count each death.
alter table {schema}.saga add column suspicion smallint not null default 0;
