-- Requests whose effects are in no transaction of ours, while they run (H20 to H24). {schema} is the configured schema.

-- Beside a record that is PROCESSING. Whoever ends the request locks this row by its token first, and deletes it. A row
-- whose worker has no good lease is anybody's to take, with a token that is greater.
create table {schema}.request (
    key         bytea primary key,
    scope_id    integer not null,
    token       bigint not null,
    worker      bigint not null,                 -- of the lease: a row of `worker`, which may be gone
    again       boolean not null default false,  -- a former owner was lost, and may have run it
    started_at  timestamptz not null
);
