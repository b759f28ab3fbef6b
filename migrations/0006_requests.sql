-- Requests whose effects are in no transaction of ours, while they run (H20 to H24). {schema} is the configured schema.

-- Whoever ends the request locks this row by its token first, and deletes it. A row whose worker has no good lease is
-- anybody's to take, with a token that is greater.
create table {schema}.request (
    key         bytea primary key,
    scope_id    integer not null,
    token       bigint not null,
    worker      bigint not null,
    again       boolean not null default false,
    started_at  timestamptz not null
);

comment on table {schema}.request is 'Requests that run, each beside a record that is PROCESSING';
comment on column {schema}.request.token is 'Fencing token, which grows with every owner';
comment on column {schema}.request.worker is 'Of the lease: a row of `worker`, which may be gone';
comment on column {schema}.request.again is 'A former owner was lost, and may have run it';
