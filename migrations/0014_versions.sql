-- What a deployment may change while sagas run. {schema} is the configured schema.

-- L28. The handlers of sagas that a worker runs, each as {{"app": …, "handler": …, "version": …}}. Null: it is of an earlier
-- version of idemconsumer, and may run any.
alter table {schema}.worker add column runs jsonb;

-- L29. The first id of its process, which gets another one after a lost lease; null: this one. The later, the newer.
alter table {schema}.worker add column born bigint;

-- L24. A call that the handler's own task began, with no step beside it, so that it has a fixed place among the steps.
-- False also for one that a worker of an earlier version began, of which that is not known.
alter table {schema}.step add column placed boolean not null default false;

-- The app that a saga was moved to; null: the one that its scope names. Its scope stays, for the keys of its steps.
alter table {schema}.saga add column app text;
