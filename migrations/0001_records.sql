-- Records: what a key is, its claim, and the guard of the commit that decides it. {schema} is the configured schema.

create table {schema}.scope (
    id          integer generated always as identity primary key,
    name        text not null unique,
    retain      interval not null default '14 days',
    seen_at     timestamptz not null default now(),
    retired_at  timestamptz
);

comment on table {schema}.scope is 'What keys are unique within. One without records is pruned (R30)';
comment on column {schema}.scope.name is 'app/tenant/handler, each with % and / escaped; a tenant of - means none';
comment on column {schema}.scope.retain is 'How long its final records are kept';
comment on column {schema}.scope.seen_at is 'When pruning last saw a record of it, to half a day';
comment on column {schema}.scope.retired_at is 'Since when it has had no record and none is claimed; null: it is in use';

-- Whoever names a scope uses it. Pruning changes neither of these columns.
create function {schema}.use_scope() returns trigger language plpgsql as $$
begin
    new.retired_at := null;
    new.seen_at := clock_timestamp();
    return new;
end
$$;

create trigger used before update of name, retain on {schema}.scope
    for each row when (old.retired_at is not null) execute function {schema}.use_scope();

-- Brings back those that are retired, and refuses those that are gone.
create function {schema}.use_scopes(scopes int[]) returns void language plpgsql as $$
begin
    update {schema}.scope as s set retired_at = null, seen_at = clock_timestamp()
    where s.id in (
        select u.id from {schema}.scope as u
        where u.id = any (use_scopes.scopes) and u.retired_at is not null order by u.id for update
    );
    if exists (
        select from unnest(use_scopes.scopes) as c (id)
        where not exists (select from {schema}.scope as s where s.id = c.id offset 0)
    ) then
        raise exception 'the scope of a claim has been pruned' using errcode = 'IC003';
    end if;
end
$$;

-- Narrow on purpose: a row is written for every message. No index on time: pruning walks the table in block order. What
-- pruning frees is used again before a fifth of a large table is dead.
create table {schema}.record (
    key          bytea primary key,
    scope_id     integer not null,
    state        smallint not null,
    fingerprint  bytea,
    changed_at   timestamptz not null,
    canonical    bytea,
    expires_at   timestamptz
) with (autovacuum_vacuum_scale_factor = 0.02, autovacuum_vacuum_threshold = 10000);

comment on table {schema}.record is 'One row for each key: whether its message was applied';
comment on column {schema}.record.key is 'Hash of app, tenant, handler and key (R10, R38)';
comment on column {schema}.record.state is '0 pending, 1 processing, 2 undoing, 3 completed, 4 failed, 5 dead';
comment on column {schema}.record.fingerprint is 'Hash of the payload''s bytes, or of what the handler compares of it';
comment on column {schema}.record.canonical is
    'Shortened hash of the payload''s canonical JSON; null: only the fingerprint is compared (R26)';
comment on column {schema}.record.expires_at is
    'From then on a record that is completed or failed counts as none (R37); null: it counts as long as it is there';

-- It expires so long after it has ended, whoever ends it.
create function {schema}.expire_later() returns trigger language plpgsql as $$
begin
    new.expires_at := old.expires_at + (new.changed_at - old.changed_at);
    return new;
end
$$;

create trigger expires before update of changed_at on {schema}.record
    for each row when (old.expires_at is not null) execute function {schema}.expire_later();

create table {schema}.result (
    key           bytea primary key,
    body          bytea not null,
    content_type  text not null,
    status        smallint,
    headers       bytea
) with (autovacuum_vacuum_scale_factor = 0.02, autovacuum_vacuum_threshold = 10000);

comment on table {schema}.result is 'What a handler returned, replayed byte for byte; no row if that was nothing';
comment on column {schema}.result.status is 'Of a response to an HTTP request (R36), else null';
comment on column {schema}.result.headers is
    'JSON list of names and values in their order, without the content type; bytea, since jsonb cannot hold NUL';

create table {schema}.attempt (
    key         bytea primary key,
    scope_id    integer not null,
    count       integer not null,
    error       text,
    changed_at  timestamptz not null,
    reader      bigint
);

comment on table {schema}.attempt is
    'Failed attempts, each counted in a transaction of its own, since the rollback of a failed handler erases all else';
comment on column {schema}.attempt.count is '0: it has begun, and nobody knows yet how it ends';
comment on column {schema}.attempt.reader is
    'Number on which the process that decodes the message holds an advisory lock (B17); null: the message runs';

create table {schema}.hashing (
    one      boolean primary key default true check (one),
    wrapped  bytea not null,
    since    timestamptz not null default clock_timestamp()
);

comment on table {schema}.hashing is 'How the keys of this schema are hashed, from the first record on (R38); one row';
comment on column {schema}.hashing.wrapped is
    'The data key, wrapped by a secret that is not here (R39); empty: SHA-256 without a secret';

-- The guard. The engine opens a transaction with set_config('idemconsumer.open', token, true) and seals it with its
-- last statement. A COMMIT by anybody else finds no seal and fails; a ROLLBACK loses `open` and shows at the seal.
--
-- Both name what they call, their comparisons too (J17): a handler may put a schema of its own before pg_catalog. No SET
-- search_path: it would cost at each call.
create function {schema}.guard() returns trigger language plpgsql as $$
begin
    if coalesce(pg_catalog.current_setting('idemconsumer.sealed', true), '') operator(pg_catalog.=) ''
       or coalesce(pg_catalog.current_setting('idemconsumer.open', true), '')
          operator(pg_catalog.<>) pg_catalog.current_setting('idemconsumer.sealed', true) then
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
    if coalesce(pg_catalog.current_setting('idemconsumer.open', true), '') operator(pg_catalog.<>) token then
        raise exception 'the transaction that the engine opened was ended before its seal'
            using errcode = 'IC001', hint = 'A handler must not end the transaction it runs in.';
    end if;
    if pg_catalog.current_setting('synchronous_commit') operator(pg_catalog.=) 'off' then
        raise exception 'synchronous_commit is off: a crash would lose what has been acknowledged'
            using errcode = 'IC002';
    end if;
    perform pg_catalog.set_config('idemconsumer.sealed', token, true);
end
$$;

-- J3: a transaction in which no code of a user's runs is sealed as it opens, unless its session is not as it was (J25):
-- `expected` is empty where that is not known. Returns what it is.
create function {schema}.open_sealed(token text, lock_timeout text, expected text, session text)
returns text language plpgsql as $$
begin
    if expected operator(pg_catalog.<>) '' and expected operator(pg_catalog.<>) session then
        raise exception 'the session is not as it was' using errcode = 'IC001';
    end if;
    perform pg_catalog.set_config('idemconsumer.open', token, true),
        pg_catalog.set_config('lock_timeout', lock_timeout, true), {schema}.seal(token);
    return session;
end
$$;

-- The claim of a whole group, in one round trip with BEGIN.
--
-- One atomic insert (R3). The advisory lock comes first, in the same statement: without it the insert would block behind
-- an uncommitted rival and pin the connection (J1). Returns what was not inserted: its record as a second statement reads
-- it, with a snapshot of its own, or nulls where a rival holds the key. Joined claims are written in their final state,
-- COMPLETED, since nobody sees them before the commit (J2).
--
-- A function, so that its plans are kept: the statement itself is sent as text, with BEGIN. LATERAL ... OFFSET 0 keeps
-- the reading an index lookup for each key even when it was planned while the table was empty (G5).
--
-- `expires`: for how many seconds the record counts once it is final; null where it does not expire, or for all. What has
-- expired stands in the way of the insert, is deleted under the lock that the first statement has taken, and the insert is
-- repeated; so a claim that finds its keys free pays nothing for it. EXECUTE plans that each time: a plan from when the
-- table was small would scan all of it (G5).
--
-- `met`: the caller has looked the scopes up within half a day, so none of them can go before its record is there, and
-- looking at them each time would be a tenth of a claim. Otherwise they are looked at after the insert, in a later
-- statement: either this sees that one is retired, or its record is there when those of a retired one are looked for.
create function {schema}.claim(
    keys bytea[], scopes int[], fingerprints bytea[], canonicals bytea[], expires float8[], state smallint, met boolean
) returns table (
    key bytea, found smallint, fingerprint bytea, body bytea, content_type text, canonical bytea, status smallint,
    headers bytea
) language plpgsql as $$
#variable_conflict use_column
declare
    claimed bytea[];
    expired bytea[];
begin
    for each in 1..2 loop
        with inserted as (
            insert into {schema}.record (key, scope_id, state, fingerprint, canonical, changed_at, expires_at)
            select c.key, c.scope_id, claim.state, c.fingerprint, c.canonical, clock_timestamp(),
                clock_timestamp() + make_interval(secs => c.expires)
            from unnest(claim.keys, claim.scopes, claim.fingerprints, claim.canonicals, claim.expires)
                as c (key, scope_id, fingerprint, canonical, expires)
            where (expired is null or c.key = any (expired))
              and pg_try_advisory_xact_lock(('x' || encode(substring(c.key for 8), 'hex'))::bit(64)::bigint)
            on conflict do nothing
            returning record.key
        )
        select claimed || array_agg(inserted.key) into claimed from inserted;
        exit when cardinality(claimed) = cardinality(claim.keys) or expired is not null;
        expired := array(
            select w.key from unnest(claim.keys) as w (key)
            cross join lateral (
                select from {schema}.record as r
                where r.key = w.key and r.expires_at <= clock_timestamp() and r.state in (3, 4) offset 0
            ) as old
            where claimed is null or w.key <> all (claimed)
        );
        exit when cardinality(expired) = 0;
        execute $sql$
            with gone as (
                delete from {schema}.record where key = any ($1) and expires_at <= clock_timestamp() and state in (3, 4)
                    and pg_try_advisory_xact_lock(('x' || encode(substring(key for 8), 'hex'))::bit(64)::bigint)
                returning key
            ), gathered as (
                select array_agg(key) as keys from gone
            ), results as (
                delete from {schema}.result where key = any ((select keys from gathered)::bytea[])
            ), histories as (
                delete from {schema}.history where key = any ((select keys from gathered)::bytea[])
            ), signals as (
                delete from {schema}.signal where key = any ((select keys from gathered)::bytea[])
            ), children as (
                delete from {schema}.child where parent = any ((select keys from gathered)::bytea[])
            ), steps as (
                delete from {schema}.step where key = any ((select keys from gathered)::bytea[])
            )
            select coalesce(keys, '{{}}') from gathered
        $sql$ into expired using expired;
    end loop;
    if not met and not claim.scopes <@ array(
        select s.id from {schema}.scope as s where s.id = any (claim.scopes) and s.retired_at is null
    ) then
        perform {schema}.use_scopes(claim.scopes);
    end if;
    if cardinality(claimed) = cardinality(claim.keys) then
        return;
    end if;
    -- One that has expired and could not be deleted is a rival's.
    return query
        select w.key, r.state, r.fingerprint, s.body, s.content_type, r.canonical, s.status, s.headers
        from unnest(claim.keys) as w (key)
        left join lateral (
            select state, fingerprint, canonical from {schema}.record
            where key = w.key and (expires_at is null or expires_at > clock_timestamp() or state not in (3, 4)) offset 0
        ) as r on true
        left join lateral (
            select body, content_type, status, headers from {schema}.result where key = w.key offset 0
        ) as s on true
        where claimed is null or w.key <> all (claimed);
end
$$;
