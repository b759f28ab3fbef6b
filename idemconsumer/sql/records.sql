-- Joined mode: the transaction, claims, attempts and dead letters, one statement per name.
-- queries.py describes the format: {schema} is the configured schema, {COMPLETED} the number stored for that state.

-- fragment: session
-- The part of the session's state that a transaction of the engine checks (J25): the most dangerous settings among
-- those that the server does not report by itself. Each further setting costs each transaction two microseconds.
pg_catalog.concat_ws('|', current_user, pg_catalog.current_setting('search_path'),
    pg_catalog.current_setting('session_replication_role'), pg_catalog.current_setting('statement_timeout'))

-- name: begin
-- The isolation level is explicit, whatever the database's default (R1). Outside of this, connections are read-only.
begin isolation level read committed read write

-- name: unchanged
-- Behind a pooler the session may have belonged to another client: one on which our rules would not hold is refused
-- (R18).
do $$ begin
    if pg_catalog.current_setting('default_transaction_read_only') operator(pg_catalog.<>) 'on'
       or pg_catalog.current_setting('session_replication_role') operator(pg_catalog.=) 'replica'
    then
        raise exception 'somebody has changed the settings of the pooler''s session' using errcode = '57000';
    end if;
end $$

-- name: gate
-- Groups that change the same rows take turns (G3). The two-part lock is in a key space of its own: keys are locked by
-- one bigint. The wait is intended, but ends as contention (J22), since the session that holds the gate may be frozen.
-- `open` sets lock_timeout again.
set local statement_timeout = 0; set local lock_timeout = %(gate_timeout)s;
select pg_advisory_xact_lock(1768186979, %(gate)s);
set local statement_timeout to default

-- name: open
-- The value that the seal compares (J3). Local to the transaction: a ROLLBACK erases it. The pid is for queries about
-- this transaction: behind a pooler there is no other way to get it (R18).
select pg_catalog.set_config('idemconsumer.open', %(seal)s, true),
    pg_catalog.set_config('lock_timeout', %(lock_timeout)s, true), {session}, pg_catalog.pg_backend_pid()

-- name: open_sealed
-- `open` and the seal in one, for a transaction in which no user code runs. See the function (migrations/0001).
select {schema}.open_sealed(%(seal)s, %(lock_timeout)s, %(session)s, {session}), pg_catalog.pg_backend_pid()

-- name: waits_for_lock
-- Unlike pg_stat_activity, this shows it to every role.
select cardinality(pg_blocking_pids(%(pid)s)) > 0

-- name: settle_hashing
-- R38. The first process to open the schema decides how its keys are hashed. With a secret only if there is no key yet.
insert into {schema}.hashing (wrapped) select %(wrapped)s
where %(wrapped)s = ''::bytea or not exists (select from {schema}.record) and not exists (select from {schema}.attempt)
    and not exists (select from {schema}.dead_letter where key is not null) and not exists (select from {schema}.signal)
on conflict do nothing

-- name: hashing
select wrapped from {schema}.hashing

-- name: born
-- H33. What distinguishes it from all other databases: its name, and when the schema was created.
select current_database() || ' ' || extract(epoch from min(applied_at)) as born from {schema}.migration

-- name: wrap_anew
-- R39. Unless another process has done so meanwhile.
update {schema}.hashing set wrapped = %(anew)s where wrapped = %(wrapped)s returning one

-- name: server_started
select pg_postmaster_start_time()

-- name: restore
-- Resets the session, after a handler that may have changed it (J21). It does so in the transaction, so that the next
-- handler of the group runs in the original session, or because a pooler hands the session on at COMMIT. First the
-- seal, which raises unless this is still the transaction that was opened. The mark is a new one each time: a rollback
-- to a savepoint of the handler before this brings the old mark back, and then nothing is committed (R4).
reset session authorization; reset role; select {schema}.seal(%(seal)s);
close all; reset all; select pg_catalog.pg_advisory_unlock_all();
unlisten *; discard temp; discard sequences; deallocate all;
select pg_catalog.set_config('idemconsumer.sealed', '', true),
       pg_catalog.set_config('idemconsumer.open', %(mark)s, true),
       pg_catalog.set_config('lock_timeout', %(lock_timeout)s, true)

-- name: restore_local
-- As `restore`, after a handler that only used what ends with the transaction: other handlers of its group follow (G6).
select {schema}.seal(%(seal)s); close all; reset all; discard temp;
select pg_catalog.set_config('idemconsumer.sealed', '', true),
       pg_catalog.set_config('idemconsumer.open', %(mark)s, true),
       pg_catalog.set_config('lock_timeout', %(lock_timeout)s, true)

-- name: own_role
-- After a handler that is alone in its transaction: its settings stay for its deferred triggers, which COMMIT runs.
-- Only the engine's last statements must not run as another role.
reset session authorization; reset role

-- name: reset_session
-- The rest of `restore`, once its transaction is over (J21).
reset session authorization; reset role; close all; reset all; select pg_catalog.pg_advisory_unlock_all();
unlisten *; discard temp; discard sequences; deallocate all

-- name: reset_all
-- A handler's RESET ALL, which keeps the mark of the transaction if there is one.
do $$
begin
    perform {schema}.seal(%(seal)s);
    reset all;
    perform pg_catalog.set_config('idemconsumer.sealed', '', true),
            pg_catalog.set_config('idemconsumer.open', %(seal)s, true),
            pg_catalog.set_config('lock_timeout', %(lock_timeout)s, true);
end
$$

-- name: all_immediate
-- A handler's SET CONSTRAINTS ALL IMMEDIATE: the guard stays deferred.
do $$
declare
    names text;
begin
    select pg_catalog.string_agg(pg_catalog.format('%%I.%%I', n.nspname, c.conname), ', ') into names
    from pg_catalog.pg_constraint c join pg_catalog.pg_namespace n on n.oid = c.connamespace
    where c.condeferrable and pg_catalog.has_schema_privilege(n.oid, 'usage')
      and not (n.nspname = {schema_name} and c.conname = 'sealed');
    if names is not null then
        execute 'set constraints ' || names || ' immediate';
    end if;
end
$$

-- name: meet_scopes
-- The ids of scopes, created on first use. `retain` is that of the handler that was started last. In the order of their
-- names, so that two workers cannot deadlock here.
with given as materialized (
    select w.name, make_interval(secs => w.retain) as retain
    from unnest(%(names)s::text[], %(retains)s::float8[]) as w (name, retain)
), known as materialized (
    select s.name, s.id from given as g
    join {schema}.scope as s on s.name = g.name and s.retain = g.retain and s.retired_at is null
), met as (
    insert into {schema}.scope (name, retain)
    select g.name, g.retain from given as g where not exists (select from known as k where k.name = g.name)
    order by g.name
    on conflict (name) do update set retain = excluded.retain
    returning name, id
)
select name, id from known union all select name, id from met

-- fragment: counts
-- R37. Any other record counts as none.
(expires_at is null or expires_at > clock_timestamp() or state not in ({COMPLETED}, {FAILED}))

-- name: claim
-- See the function (migrations/0001). It returns the keys that were not claimed.
select * from {schema}.claim(%(claims)s::{schema}.claim[], %(state)s::smallint, true)

-- name: differs
-- Whether a rival, whose claim of the key is not committed, shows another fingerprint (J1, `prepare_claim` in
-- migrations/0001). All locks are read once, so that both are of one moment.
with held as materialized (
    select pid, classid::bigint as high, objid::bigint as low, objsubid from pg_locks
    where locktype = 'advisory' and granted and database = (
        select oid from pg_database where datname = current_database()
    )
), wanted as (
    select ('x' || encode(substring(%(key)s::bytea for 8), 'hex'))::bit(64)::bigint as lock,
        {schema}.shown_as(%(fingerprint)s::bytea)::bigint & 4294967295 as shown
)
select count(*) > 0 and count(*) filter (where s.low = w.shown) = 0
from wanted as w
join held as k on k.objsubid = 1 and k.high = (w.lock >> 32) & 4294967295 and k.low = w.lock & 4294967295
join held as s on s.pid = k.pid and s.objsubid = 2 and s.high = 1768187504

-- name: read
-- As the claim reads them (migrations/0001).
select * from {schema}.recorded(%(keys)s::bytea[], '{{}}') where state is not null

-- name: store_results
-- `statuses` and `headers` are null if no result has any (R36).
insert into {schema}.result (key, body, content_type, status, headers)
select * from unnest(%(keys)s::bytea[], %(bodies)s::bytea[], %(types)s::text[], %(statuses)s::smallint[],
    %(headers)s::bytea[])

-- name: forget_attempts
delete from {schema}.attempt where key = any(%(keys)s::bytea[])

-- name: log_deliveries
-- Returns the error instead of failing (migrations/0008).
select {schema}.log_deliveries(%(keep)s, %(app)s, %(handler)s, %(worker)s, %(keys)s::bigint[], %(sources)s,
    %(positions)s, %(outcomes)s, %(attempts)s::integer[], %(ended)s::integer[], %(arrived)s::integer[])

-- name: seal
-- The last statement before COMMIT: raises unless this is still the transaction that was opened (J3).
select {schema}.seal(%(seal)s)

-- name: seal_group
-- For several messages in one transaction: also raises if the session was changed (J25).
select {schema}.seal(case when {session} operator(pg_catalog.=) %(session)s then %(seal)s else '' end)

-- name: standby
-- Before a seal, if `require_synchronous_standby` is set (R22). With both settings as required, COMMIT itself waits.
do $$ begin
    if pg_catalog.current_setting('synchronous_standby_names') operator(pg_catalog.=) ''
       or pg_catalog.current_setting('synchronous_commit') operator(pg_catalog.<>) all ('{{on,remote_apply}}'::pg_catalog.text[])
    then
        raise exception 'require_synchronous_standby is set, and COMMIT would wait for no synchronous standby'
            using errcode = 'IC002', hint = 'set synchronous_standby_names, and synchronous_commit to on';
    end if;
end $$

-- name: mark_attempts
-- Marks messages as begun, without counting an attempt. In key order, so that two workers cannot deadlock here.
insert into {schema}.attempt (key, scope_id, count, changed_at)
select key, scope_id, 0, clock_timestamp() from unnest(%(keys)s::bytea[], %(scopes)s::integer[]) as w (key, scope_id)
order by key
on conflict (key) do nothing
returning key

-- name: unmark_attempts
delete from {schema}.attempt where key = any(%(keys)s::bytea[]) and count = 0

-- name: count_attempt
-- By the scope's name: within an open transaction no scope can be created, and the process may have forgotten the id.
insert into {schema}.attempt (key, scope_id, count, error, changed_at)
values (%(key)s, (select id from {schema}.scope where name = %(scope)s), 1, %(error)s, clock_timestamp())
on conflict (key) do update
set count = attempt.count + 1, error = coalesce(excluded.error, attempt.error), changed_at = excluded.changed_at
returning count

-- name: uncount_attempt
update {schema}.attempt set count = greatest(count - 1, 0) where key = %(key)s

-- name: note_error
update {schema}.attempt set error = %(error)s, changed_at = clock_timestamp() where key = %(key)s returning count

-- name: begin_reading
-- B17: as mark_attempts, for deliveries that are about to be decoded.
insert into {schema}.attempt (key, scope_id, count, reader, changed_at)
select key, scope_id, 0, %(reader)s, clock_timestamp() from unnest(%(keys)s::bytea[], %(scopes)s::integer[]) as w (key, scope_id)
order by key
on conflict (key) do nothing

-- name: readers
-- In a statement of its own, which sees what rivals have committed by now. If there is no row, or it is neither `ours`
-- nor `gone`, a rival has just read the message, or is reading it. A reader locks its number before it commits its row.
select w.key, a.reader is not distinct from %(reader)s as ours,
    case when a.reader is distinct from %(reader)s
         then a.reader is null or pg_try_advisory_xact_lock(a.reader) else false end as gone
from unnest(%(keys)s::bytea[]) as w (key)
cross join lateral (select reader from {schema}.attempt where key = w.key offset 0) as a

-- name: take_over_reading
-- Counts it for a reader that is gone. It does not count if the number is one of this process, which lives: then only
-- the connection was lost. No row: another process was faster. CASE, so that no other row's reader is tried.
update {schema}.attempt
set count = count + coalesce(reader <> all(%(own)s::bigint[]), true)::int, reader = %(reader)s, changed_at = clock_timestamp()
where key = %(key)s and case
    when key <> %(key)s then false
    when reader is null or reader = %(reader)s then true
    else pg_try_advisory_xact_lock(reader)
end
returning count

-- name: lock_reader
-- A lock of the session, since one of the transaction ends with its COMMIT; `hold_reader` follows in the same message.
select pg_advisory_lock_shared(%(reader)s)

-- name: hold_reader
select pg_advisory_xact_lock_shared(%(reader)s); select pg_advisory_unlock_shared(%(reader)s)

-- name: end_reading
delete from {schema}.attempt where key = any(%(keys)s::bytea[]) and reader = %(reader)s

-- name: dead_letter
-- Another arrival only raises the count, so that a poison message that keeps arriving stays one row (R24). `again` is
-- the content of a message that was delivered before and has no id of its own. `letter` is the dead letter that was
-- redriven (O3); from now on it has the error of this latest failure. A saga's is in the saga's row (O24).
with reopened as (
    update {schema}.dead_letter
    set arrivals = arrivals + 1, last_at = clock_timestamp(), reason = %(reason)s, error = %(error)s,
        attempts = %(attempts)s, scope = %(scope)s, key = coalesce(%(key)s::bytea, key), body = %(body)s::bytea,
        headers = %(headers)s::bytea, delivered = %(delivered)s::bytea, body_sha256 = %(body_sha256)s::bytea,
        traceback = %(traceback)s, emptied_at = null, round = round + 1, forwarded_at = null
    where id = coalesce(%(letter)s::bigint, (select s.letter from {schema}.saga as s where s.key = %(key)s::bytea))
    returning id, round
), known as (
    update {schema}.dead_letter set arrivals = arrivals + 1, last_at = clock_timestamp()
    where not exists (select from reopened)
      and id = (select max(id) from {schema}.dead_letter where content = %(again)s)
    returning id
), added as (
    insert into {schema}.dead_letter
        (identity, handler, scope, source, position, reason, error, key, body, headers, attempts, delivered, body_size,
         body_sha256, content, traceback, first_at, last_at)
    select %(identity)s, %(handler)s, %(scope)s, %(source)s, %(position)s, %(reason)s, %(error)s, %(key)s::bytea,
        %(body)s::bytea, %(headers)s::bytea, %(attempts)s, %(delivered)s::bytea, %(body_size)s, %(body_sha256)s::bytea,
        %(content)s::bytea, %(traceback)s, clock_timestamp(), clock_timestamp()
    where not exists (select from reopened) and not exists (select from known)
    on conflict (identity) do update
    set arrivals = dead_letter.arrivals + 1, last_at = excluded.last_at
    returning id, xmax = 0 as inserted
), outdated as (
    delete from {schema}.outbox where letter = any(array(select id from reopened))
), forwards as (  -- O19: each time that it is written, and not for each arrival
    insert into {schema}.outbox (destination, letter, key, body)
    select %(forward)s, id, concat(%(app)s::text, '-dead-', id, case when round > 1 then '.' || round end), ''
    from (select id, round from reopened union all select id, 1 from added where inserted) as written
    where %(forward)s::text is not null
    returning pg_notify('idemconsumer_queue', 'outbox:' || left(destination, 1000))
)
select id from reopened union all select id from known union all select id from added

-- name: count_dead
update {schema}.dead_letter set arrivals = arrivals + 1, last_at = clock_timestamp()
where id = (select max(id) from {schema}.dead_letter where key = %(key)s)
returning id, reason
