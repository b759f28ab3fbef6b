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

-- What is stored of a key that is claimed, and what its claim may take: in this order `Claim.row` in Python has it. Once this
-- is released, another attribute needs a type of its own, with functions of the same names for it: workers of the version
-- before write rows as they know them (R32).
create type {schema}.claim as (
    key          bytea,
    scope_id     integer,
    fingerprint  bytea,
    canonical    bytea,
    expires      double precision,
    pending      boolean,
    token        bytea,
    shown        boolean
);

comment on type {schema}.claim is 'A key about to be claimed, by a message, a saga or a request';
comment on column {schema}.claim.expires is
    'For how many seconds the record counts once it is final (R37); null: as long as it is there';
comment on column {schema}.claim.pending is 'It may take a record that is pending: this is the message that waits (D19)';
comment on column {schema}.claim.token is 'It may take one that is pending and has this token beside it (H46)';
comment on column {schema}.claim.shown is 'Until the commit others can see its fingerprint (H4)';

create type {schema}.recorded as (
    key           bytea,
    state         smallint,
    fingerprint   bytea,
    body          bytea,
    content_type  text,
    canonical     bytea,
    status        smallint,
    headers       bytea
);

comment on type {schema}.recorded is 'What is on record of a key; all but the key null: nothing that counts';

-- What is on record of each key, without what is pending of `awaited`. LATERAL ... OFFSET 0 keeps this an index lookup for
-- each key even when it was planned while the table was empty (G5).
create function {schema}.recorded(keys bytea[], awaited bytea[])
returns setof {schema}.recorded language sql stable as $$
    select w.key, r.state, r.fingerprint, s.body, s.content_type, r.canonical, s.status, s.headers
    from unnest(keys) as w (key)
    left join lateral (
        select state, fingerprint, canonical from {schema}.record
        where key = w.key and (expires_at is null or expires_at > clock_timestamp() or state not in (3, 4))
          and not (state = 0 and key = any (awaited)) offset 0
    ) as r on true
    left join lateral (
        select body, content_type, status, headers from {schema}.result where key = w.key offset 0
    ) as s on true
$$;

-- R26: equal bytes or an equal value, each as far as both sides know it. As `judge` in rules/verdicts.py has it.
create function {schema}.same_payload(fingerprint bytea, canonical bytea, other_fingerprint bytea, other_canonical bytea)
returns boolean language sql immutable as $$
    select (fingerprint is null or other_fingerprint is null or fingerprint = other_fingerprint
            or canonical = other_canonical) is true
$$;

-- The claim of a whole group, in one round trip with BEGIN.
--
-- One atomic insert (R3). The advisory lock comes first, in the same statement: without it the insert would block behind
-- an uncommitted rival and pin the connection (J1). Returns what was not inserted: its record as a second statement reads
-- it, with a snapshot of its own, or nulls where a rival holds the key. Joined claims are written in their final state,
-- COMPLETED, since nobody sees them before the commit (J2).
--
-- A function, so that its plans are kept: the statement itself is sent as text, with BEGIN.
--
-- `expires`: what has expired stands in the way of the insert, is deleted under the lock that the first statement has taken,
-- and the insert is repeated; so a claim that finds its keys free pays nothing for it. EXECUTE plans that each time: a plan
-- from when the table was small would scan all of it (G5).
--
-- `met`: the caller has looked the scopes up within half a day, so none of them can go before its record is there, and
-- looking at them each time would be a tenth of a claim. Otherwise they are looked at after the insert, in a later
-- statement: either this sees that one is retired, or its record is there when those of a retired one are looked for.
create function {schema}.claim(claims {schema}.claim[], state smallint, met boolean)
returns setof {schema}.recorded language plpgsql as $$
#variable_conflict use_column
declare
    awaited bytea[] := '{{}}';
    claimed bytea[];
    expired bytea[];
    scopes int[];
    missed bytea[];
begin
    if exists (select from unnest(claims) as c where c.shown or c.pending or c.token is not null) then
        awaited := {schema}.prepare_claim(claims);
    end if;
    for each in 1..2 loop
        with inserted as (
            insert into {schema}.record (key, scope_id, state, fingerprint, canonical, changed_at, expires_at)
            select c.key, c.scope_id, claim.state, c.fingerprint, c.canonical, clock_timestamp(),
                clock_timestamp() + make_interval(secs => c.expires)
            from unnest(claims) as c
            where (expired is null or c.key = any (expired))
              and pg_try_advisory_xact_lock(('x' || encode(substring(c.key for 8), 'hex'))::bit(64)::bigint)
            on conflict do nothing
            returning record.key
        )
        select claimed || array_agg(inserted.key) into claimed from inserted;
        exit when cardinality(claimed) = cardinality(claims) or expired is not null;
        expired := array(
            select w.key from unnest(claims) as w
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
    if not met then
        scopes := array(select c.scope_id from unnest(claims) as c);
        if not scopes <@ array(select s.id from {schema}.scope as s where s.id = any (scopes) and s.retired_at is null) then
            perform {schema}.use_scopes(scopes);
        end if;
    end if;
    if cardinality(claimed) = cardinality(claims) then
        return;
    end if;
    missed := array(select w.key from unnest(claims) as w where claimed is null or w.key <> all (claimed));
    -- One that has expired and could not be deleted is a rival's. So is one that waits for this very message and is pending
    -- still: to take the message for its duplicate would lose it (H46).
    return query select * from {schema}.recorded(missed, awaited);
end
$$;

-- Before the insert: fingerprints are shown, as locks that exclude nobody (H4), and the records that wait for these
-- messages make room for them, those with a token if no other payload came under it. By the claim's lock (J1), so that
-- nobody waits; a rollback brings them back. Returns the keys that wait for a token, also where somebody has their lock:
-- such a one is busy, and its message no duplicate. The two-part locks are a space of their own; the first part is not
-- that of the gate. EXECUTE for plans, as in `claim`.
create function {schema}.prepare_claim(claims {schema}.claim[]) returns bytea[] language plpgsql as $$
#variable_conflict use_column
declare
    awaited bytea[];
begin
    perform pg_advisory_xact_lock_shared(1768187504, {schema}.shown_as(c.fingerprint))
    from unnest(claims) as c where c.shown and c.fingerprint <> '';
    if not exists (select from unnest(claims) as c where c.pending or c.token is not null) then
        return '{{}}';
    end if;
    awaited := array(
        select c.key from unnest(claims) as c
        cross join lateral (select token from {schema}.accepted where key = c.key offset 0) as a
        cross join lateral (select state, fingerprint, canonical from {schema}.record where key = c.key offset 0) as r
        where a.token = c.token and not c.pending and r.state = 0
          and {schema}.same_payload(r.fingerprint, r.canonical, c.fingerprint, c.canonical)
    );
    execute $sql$
        with taken as (
            delete from {schema}.record where key = any ($1) and state = 0
                and pg_try_advisory_xact_lock(('x' || encode(substring(key for 8), 'hex'))::bit(64)::bigint)
            returning key
        )
        update {schema}.accepted set token = null where key = any (array(select key from taken)) and token is not null
    $sql$ using awaited || array(select c.key from unnest(claims) as c where c.pending);
    return awaited;
end
$$;

-- 32 bits of a fingerprint, as the number of a lock.
create function {schema}.shown_as(fingerprint bytea) returns integer language sql immutable as $$
    select ('x' || encode(substring(fingerprint for 4), 'hex'))::bit(32)::integer
$$;
