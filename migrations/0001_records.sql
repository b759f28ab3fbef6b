-- Records, results, attempts, dead letters and the Postgres queue. {schema} is the configured schema.

create table {schema}.scope (
    id      integer generated always as identity primary key,
    name    text not null unique,                -- app/tenant/handler: what a key is unique within
    retain  interval not null default '14 days'  -- how long final records of this scope are kept
);

-- Narrow on purpose: a row is written for every message. No index on time: pruning walks the table in block order.
create table {schema}.record (
    key          bytea primary key,              -- SHA-256 of app, tenant, handler and key
    scope_id     integer not null,
    state        smallint not null,              -- 0 pending 1 processing 2 undoing 3 completed 4 failed 5 dead
    fingerprint  bytea,                          -- SHA-256 of the payload
    changed_at   timestamptz not null
);

-- Only for what returned something. Replayed byte for byte.
create table {schema}.result (
    key           bytea primary key,
    body          bytea not null,
    content_type  text not null
);

-- Counted in a transaction of its own, since the rollback of a failed handler erases everything else.
create table {schema}.attempt (
    key         bytea primary key,
    scope_id    integer not null,
    count       integer not null,
    error       text,
    changed_at  timestamptz not null
);

create table {schema}.dead_letter (
    id          bigint generated always as identity primary key,
    identity    bytea not null unique,           -- hash of source, reason, and key or body
    handler     text not null,
    scope       text not null,
    source      text not null,
    position    text not null,
    reason      text not null,
    error       text not null,
    key         bytea,                           -- null where the message had none
    body        bytea not null,
    headers     bytea not null,                  -- JSON; bytea, since jsonb cannot hold NUL
    attempts    integer not null,
    arrivals    integer not null default 1,
    first_at    timestamptz not null,
    last_at     timestamptz not null
);

create index dead_letter_key on {schema}.dead_letter (key) where key is not null;

-- The guard. The engine opens a transaction with set_config('idemconsumer.open', token, true) and seals it with its
-- last statement. A COMMIT by anybody else finds no seal and fails; a ROLLBACK loses `open` and shows at the seal.
create function {schema}.guard() returns trigger language plpgsql as $$
begin
    if coalesce(current_setting('idemconsumer.sealed', true), '') = ''
       or current_setting('idemconsumer.sealed', true) is distinct from current_setting('idemconsumer.open', true) then
        raise exception 'this transaction was committed by somebody other than the engine'
            using errcode = 'IC001', hint = 'A handler must not end the transaction it runs in.';
    end if;
    return null;
end
$$;

create constraint trigger sealed after insert or update on {schema}.record
    deferrable initially deferred for each row when (new.state >= 3)
    execute function {schema}.guard();

create function {schema}.seal(token text) returns void language plpgsql as $$
begin
    if current_setting('idemconsumer.open', true) is distinct from token then
        raise exception 'the transaction that the engine opened was ended before its seal'
            using errcode = 'IC001', hint = 'A handler must not end the transaction it runs in.';
    end if;
    if current_setting('synchronous_commit') = 'off' then
        raise exception 'synchronous_commit is off: a crash would lose what has been acknowledged'
            using errcode = 'IC002';
    end if;
    perform set_config('idemconsumer.sealed', token, true);
end
$$;

-- The queue behind `postgres:` sources. Ordered by id; visible_at is not indexed, so taking a message is a HOT update.
create table {schema}.queue (
    id          bigint generated always as identity primary key,
    name        text not null,
    message_id  text,
    body        bytea not null,
    headers     bytea not null default '\x7b7d',
    deliveries  integer not null default 0,
    token       bigint,                          -- of the current delivery; a late delete with an old one hits nothing
    visible_at  timestamptz not null default clock_timestamp()
) with (fillfactor = 70, autovacuum_vacuum_scale_factor = 0.02, autovacuum_vacuum_cost_delay = 0);

create index queue_next on {schema}.queue (name, id);

create sequence {schema}.queue_token;

create function {schema}.publish_bytes(queue text, payload bytea, key text default null, headers jsonb default '{{}}')
returns bigint language plpgsql as $$
declare
    new_id bigint;
begin
    if jsonb_typeof(coalesce(publish_bytes.headers, '{{}}')) <> 'object' then
        raise exception 'headers must be a JSON object of texts, e.g. {{"n": "v"}}' using errcode = '22023';
    end if;
    insert into {schema}.queue (name, message_id, body, headers)
    values (queue, key, payload, convert_to(coalesce(publish_bytes.headers, '{{}}')::text, 'UTF8'))
    returning id into new_id;
    perform pg_notify('idemconsumer_queue', queue);
    return new_id;
end
$$;

create function {schema}.publish(queue text, payload jsonb, key text default null, headers jsonb default '{{}}')
returns bigint language sql as $$
    select {schema}.publish_bytes(queue, convert_to(payload::text, 'UTF8'), key, headers)
$$;
