-- What happened to sagas, for people. {schema} is the configured schema.

-- Besides its steps. Written with what it tells; a saga that goes through undisturbed has no row here. Pruned with the
-- steps.
create table {schema}.history (
    id       bigint generated always as identity,
    key      bytea not null,
    at       timestamptz not null,
    what     text not null,       -- redelivered lost taken retaken released reconciled undoing parked resumed abandoned
    owner    text,                -- the worker that it is about, as its row said then
    token    bigint,
    attempt  integer,
    detail   text,
    primary key (key, id)
);

-- Taken from a worker that was lost, and what is to follow from that is not decided yet: outlives a release.
alter table {schema}.saga add column stale boolean not null default false;

-- An undo has times of its own, so that those of the step stay.
alter table {schema}.step add column undo_at timestamptz, add column undone_at timestamptz;
