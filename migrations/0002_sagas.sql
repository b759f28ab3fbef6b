-- Sagas: leases, fencing tokens, steps. {schema} is the configured schema.

-- One row a worker process, renewed by a thread of its own. A saga is stale when its worker's deadline is over.
create table {schema}.worker (
    id      bigint generated always as identity primary key,
    name    text not null,                       -- host and pid, for people
    lease   interval not null,
    until   timestamptz not null
);

create sequence {schema}.saga_token;

-- A saga while it runs, waits for its next attempt, or waits for a person. Whoever writes for it first locks this row.
create table {schema}.saga (
    key         bytea primary key,
    scope_id    integer not null,
    handler     text not null,
    state       smallint not null,               -- 1 processing 2 undoing
    token       bigint not null,                 -- grows with every owner
    worker      bigint,                          -- null: nobody's, free from `due` on
    due         timestamptz not null,
    attempt     integer not null,                -- takeovers without a finished step in between
    parked      text,                            -- why it waits for a person
    version     text,
    rejection   bytea,                           -- what FAILED will say, once undone
    error       text,
    source      text not null,
    position    text not null,
    message_id  text,
    body        bytea not null,
    headers     bytea not null,
    started_at  timestamptz not null
);

create index saga_due on {schema}.saga (handler, due);

-- Kept until the record is pruned, so that a finished saga can still be looked at.
create table {schema}.step (
    key           bytea not null,
    name          text not null,
    kind          smallint not null,             -- 1 tx 2 call
    state         smallint not null,             -- 1 intent 2 done 3 rejected 4 undo intent 5 undone
    has_undo      boolean not null,
    overlapped    boolean not null default false,
    position      bigint,                        -- order of finishing
    token         bigint not null,               -- of the owner that wrote it last
    attempt       integer not null default 1,
    output        bytea,
    content_type  text,
    started_at    timestamptz not null,
    finished_at   timestamptz,
    primary key (key, name)
);

-- The guard for steps: a COMMIT inside a step's function finds no seal, so the effect cannot outlive its checkpoint.
create constraint trigger sealed after insert or update on {schema}.step
    deferrable initially deferred for each row
    execute function {schema}.guard();
