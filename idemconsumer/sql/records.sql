-- Joined mode: the transaction, claims, attempts, dead letters and retention, one statement per name.
-- queries.py describes the format: {schema} is the configured schema, {COMPLETED} the number stored for that state.

-- fragment: session
-- What a transaction of the engine has to find as it was (J25): what is most dangerous of what the server does not report
-- by itself. Each setting more costs each transaction two microseconds.
pg_catalog.concat_ws('|', current_user, pg_catalog.current_setting('search_path'),
    pg_catalog.current_setting('session_replication_role'), pg_catalog.current_setting('statement_timeout'))

-- name: begin
-- The isolation level is explicit, whatever the database's default (R1). Outside of this, connections are read-only.
begin isolation level read committed read write

-- name: unchanged
-- Behind a pooler a session may have been another's before: one on which our rules would not hold is refused (R18).
do $$ begin
    if pg_catalog.current_setting('default_transaction_read_only') operator(pg_catalog.<>) 'on'
       or pg_catalog.current_setting('session_replication_role') operator(pg_catalog.=) 'replica'
    then
        raise exception 'somebody has changed the settings of the pooler''s session' using errcode = '57000';
    end if;
end $$

-- name: gate
-- Groups that change the same rows take turns (G3). The two-part lock has a space of its own: keys are locked by one
-- bigint. The wait is intended, but has an end, as contention (J22): a session ahead may be frozen. `open` sets
-- lock_timeout again.
set local statement_timeout = 0; set local lock_timeout = %(gate_timeout)s;
select pg_advisory_xact_lock(1768186979, %(gate)s);
set local statement_timeout to default

-- name: open
-- The value that the seal compares (J3). Local to the transaction: a ROLLBACK erases it. The pid is for who asks about
-- this transaction: behind a pooler nobody else tells it (R18).
select pg_catalog.set_config('idemconsumer.open', %(seal)s, true),
    pg_catalog.set_config('lock_timeout', %(lock_timeout)s, true), {session}, pg_catalog.pg_backend_pid()

-- name: waits_for_lock
-- Unlike pg_stat_activity, this tells every role.
select cardinality(pg_blocking_pids(%(pid)s)) > 0

-- name: server_started
select pg_postmaster_start_time()

-- name: restore
-- The session as it was, after a handler that may have changed it (J21): in its transaction, so that the next handler of
-- the group finds it so too, or because a pooler gives the session away with COMMIT. First the seal, which raises unless
-- this is still the transaction that was opened. The mark is a new one each time: whoever rolls back to a savepoint of the
-- handler that this follows brings the old one back, and then nothing is committed (R4).
reset session authorization; reset role; select {schema}.seal(%(seal)s);
close all; reset all; select pg_catalog.pg_advisory_unlock_all();
unlisten *; discard temp; discard sequences; deallocate all;
select pg_catalog.set_config('idemconsumer.sealed', '', true),
       pg_catalog.set_config('idemconsumer.open', %(mark)s, true),
       pg_catalog.set_config('lock_timeout', %(lock_timeout)s, true)

-- name: restore_local
-- As `restore`, after a handler that only used what ends with the transaction: in a group others come after it (G6).
select {schema}.seal(%(seal)s); close all; reset all; discard temp;
select pg_catalog.set_config('idemconsumer.sealed', '', true),
       pg_catalog.set_config('idemconsumer.open', %(mark)s, true),
       pg_catalog.set_config('lock_timeout', %(lock_timeout)s, true)

-- name: own_role
-- After a handler that is alone in its transaction: what it set there is for its deferred triggers, which COMMIT runs.
-- Only the engine's last statements must not run as another role.
reset session authorization; reset role

-- name: reset_session
-- The rest of `restore`, once its transaction is over (J21).
reset session authorization; reset role; close all; reset all; select pg_catalog.pg_advisory_unlock_all();
unlisten *; discard temp; discard sequences; deallocate all

-- name: reset_all
-- RESET ALL of a handler, which keeps the mark of the transaction if it is there.
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
-- SET CONSTRAINTS ALL IMMEDIATE of a handler: the guard stays deferred.
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

-- name: scope
-- The id of a scope, created on first use. `retain` is that of the handler that was started last.
insert into {schema}.scope (name, retain) values (%(name)s, make_interval(secs => %(retain)s))
on conflict (name) do update set retain = excluded.retain
returning id

-- name: claim
-- The insert is in the function (migrations/0011). What it returns was not claimed.
select * from {schema}.claim(%(keys)s::bytea[], %(scopes)s::integer[], %(fingerprints)s::bytea[],
    %(canonicals)s::bytea[], %(state)s::smallint)

-- name: resume
-- Before the claim: the records that wait for these messages make room for it (D19). The lock is the claim's (J1), so
-- that nobody waits; a rollback brings them back.
delete from {schema}.record where key = any(%(keys)s::bytea[]) and state = {PENDING}
    and pg_try_advisory_xact_lock(('x' || encode(substring(key for 8), 'hex'))::bit(64)::bigint)

-- name: read
-- The records that the claim did not insert, in a separate statement and so with a new snapshot (R3). LATERAL …
-- OFFSET 0 keeps this an index lookup for each key even when it was planned while the table was empty (G5).
select w.key, r.state, r.fingerprint, s.body, s.content_type, r.canonical
from unnest(%(keys)s::bytea[]) as w (key)
cross join lateral (select state, fingerprint, canonical from {schema}.record where key = w.key offset 0) as r
left join lateral (select body, content_type from {schema}.result where key = w.key offset 0) as s on true

-- name: store_results
insert into {schema}.result (key, body, content_type)
select * from unnest(%(keys)s::bytea[], %(bodies)s::bytea[], %(types)s::text[])

-- name: forget_attempts
delete from {schema}.attempt where key = any(%(keys)s::bytea[])

-- name: seal
-- The last statement before COMMIT: raises unless this is still the transaction that was opened (J3).
select {schema}.seal(%(seal)s)

-- name: seal_group
-- Of several messages in one transaction: also raises unless the session is still as it was (J25).
select {schema}.seal(case when {session} operator(pg_catalog.=) %(session)s then %(seal)s else '' end)

-- name: standby
-- Before a seal, where `require_synchronous_standby` is set (R22). With both as they must be, COMMIT itself waits.
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
delete from {schema}.attempt where key = any(%(keys)s) and count = 0

-- name: count_attempt
insert into {schema}.attempt (key, scope_id, count, error, changed_at)
values (%(key)s, %(scope)s, 1, %(error)s, clock_timestamp())
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
-- In a statement of its own, and so with what rivals have committed by now. No row, and neither `ours` nor `gone`: a
-- rival has just read it, or does so now. A reader locks its number before it commits its row.
select w.key, a.reader is not distinct from %(reader)s as ours,
    case when a.reader is distinct from %(reader)s
         then a.reader is null or pg_try_advisory_xact_lock(a.reader) else false end as gone
from unnest(%(keys)s::bytea[]) as w (key)
cross join lateral (select reader from {schema}.attempt where key = w.key offset 0) as a

-- name: take_over_reading
-- Counts it for a reader that is gone. No row: another one has been faster. CASE, so that no other row's reader is asked.
update {schema}.attempt
set count = count + (reader is distinct from %(reader)s)::int, reader = %(reader)s, changed_at = clock_timestamp()
where key = %(key)s and case
    when key <> %(key)s then false
    when reader is null or reader = %(reader)s then true
    else pg_try_advisory_xact_lock(reader)
end
returning count

-- name: lock_reader
-- Of the session, since a lock of the transaction ends with its COMMIT; `hold_reader` follows in the same message.
select pg_advisory_lock_shared(%(reader)s)

-- name: hold_reader
select pg_advisory_xact_lock_shared(%(reader)s); select pg_advisory_unlock_shared(%(reader)s)

-- name: end_reading
delete from {schema}.attempt where key = any(%(keys)s::bytea[]) and reader = %(reader)s

-- name: dead_letter
-- Another arrival only raises the count, so that a poison message that keeps arriving stays one row (R24). `again` is
-- the content of one that was delivered before and has no identity of its own; `letter` is the one that was redriven (O3),
-- which says from now on why its message failed this time.
with reopened as (
    update {schema}.dead_letter
    set arrivals = arrivals + 1, last_at = clock_timestamp(), reason = %(reason)s, error = %(error)s,
        attempts = %(attempts)s, scope = %(scope)s, key = coalesce(%(key)s::bytea, key), body = %(body)s::bytea,
        headers = %(headers)s::bytea, delivered = %(delivered)s::bytea, body_sha256 = %(body_sha256)s::bytea,
        emptied_at = null
    where id = %(letter)s::bigint
    returning id
), known as (
    update {schema}.dead_letter set arrivals = arrivals + 1, last_at = clock_timestamp()
    where not exists (select from reopened)
      and id = (select max(id) from {schema}.dead_letter where content = %(again)s)
    returning id
), added as (
    insert into {schema}.dead_letter
        (identity, handler, scope, source, position, reason, error, key, body, headers, attempts, delivered, body_size,
         body_sha256, content, first_at, last_at)
    select %(identity)s, %(handler)s, %(scope)s, %(source)s, %(position)s, %(reason)s, %(error)s, %(key)s::bytea,
        %(body)s::bytea, %(headers)s::bytea, %(attempts)s, %(delivered)s::bytea, %(body_size)s, %(body_sha256)s::bytea,
        %(content)s::bytea, clock_timestamp(), clock_timestamp()
    where not exists (select from reopened) and not exists (select from known)
    on conflict (identity) do update
    set arrivals = dead_letter.arrivals + 1, last_at = excluded.last_at
    returning id
)
select id from reopened union all select id from known union all select id from added

-- name: count_dead
update {schema}.dead_letter set arrivals = arrivals + 1, last_at = clock_timestamp()
where id = (select max(id) from {schema}.dead_letter where key = %(key)s)
returning id, reason

-- name: blocks
select pg_relation_size('{schema}.record') / current_setting('block_size')::bigint

-- fragment: over
-- R11: final records that are past their scope's retention. A DEAD one waits for a person as long as it has a letter, or
-- a saga.
r.changed_at < clock_timestamp() - s.retain and (
    r.state in ({COMPLETED}, {FAILED})
    or r.state = {DEAD} and not exists (select from {schema}.dead_letter as d where d.key = r.key)
       and not exists (select from {schema}.saga as g where g.key = r.key))

-- name: prune
delete from {schema}.record as r using {schema}.scope as s
where r.ctid >= %(low)s::tid and r.ctid < %(high)s::tid and s.id = r.scope_id and {over}
returning r.key

-- name: prunable
select count(*) from {schema}.record as r join {schema}.scope as s on s.id = r.scope_id
where r.ctid >= %(low)s::tid and r.ctid < %(high)s::tid and {over}

-- name: keep_letters
-- O5: what the handlers of this worker say.
insert into {schema}.dead_retention (app, handler, letters, bodies)
select %(app)s, w.name, make_interval(secs => w.letters), make_interval(secs => w.bodies)
from unnest(%(names)s::text[], %(letters)s::float8[], %(bodies)s::float8[]) as w (name, letters, bodies)
on conflict (app, handler) do update set letters = excluded.letters, bodies = excluded.bodies
where (dead_retention.letters, dead_retention.bodies) is distinct from (excluded.letters, excluded.bodies)

-- fragment: aged
-- A letter of handler `k` that nobody needs: not one of a saga that waits for a person.
d.handler = k.handler and starts_with(d.scope, k.app || '/')
and not exists (select from {schema}.saga as g where g.key = d.key)

-- name: prune_letters
-- O5: of each handler that bounds them up to the limit, by the index on their time. One that was redriven is as young as
-- that.
with gone as (
    delete from {schema}.dead_letter where id in (
        select old.id from {schema}.dead_retention as k cross join lateral (
            select d.id from {schema}.dead_letter as d
            where d.last_at < (select clock_timestamp()) - k.letters
              and coalesce(d.redriven_at, d.last_at) < (select clock_timestamp()) - k.letters and {aged}
            order by d.last_at limit %(limit)s for update skip locked
        ) as old where k.letters is not null
    )
    returning id
), traces as (
    delete from {schema}.redrive where letter in (select id from gone)
)
select count(*) from gone

-- name: empty_letters
-- What an exception says may quote the message; its type and its place do not.
with emptied as (
    update {schema}.dead_letter as l
    set body_size = coalesce(body_size, length(body)), body_sha256 = '', body = '', headers = '\x7b7d', delivered = null,
        emptied_at = clock_timestamp(),
        error = coalesce({schema}.error_type(error) || ' (' || {schema}.error_place(error) || ')', error)
    where id in (
        select old.id from {schema}.dead_retention as k cross join lateral (
            select d.id from {schema}.dead_letter as d
            where d.emptied_at is null and d.last_at < (select clock_timestamp()) - k.bodies
              and coalesce(d.redriven_at, d.last_at) < (select clock_timestamp()) - k.bodies and {aged}
            order by d.last_at limit %(limit)s for update skip locked
        ) as old where k.bodies is not null
    )
    returning id
)
select count(*) from emptied

-- name: prune_results
delete from {schema}.result where key = any(%(keys)s)

-- name: prune_steps
with history as (delete from {schema}.history where key = any(%(keys)s)),
    signals as (delete from {schema}.signal where key = any(%(keys)s)),
    children as (delete from {schema}.child where parent = any(%(keys)s))
delete from {schema}.step where key = any(%(keys)s)

-- name: prune_attempts
-- Leftovers: another worker applied the message, or it is gone from the broker.
-- What is PENDING still needs them.
delete from {schema}.attempt as a using {schema}.scope as s
where s.id = a.scope_id and a.changed_at < clock_timestamp() - s.retain
  and not exists (select from {schema}.record as r where r.key = a.key and r.state = {PENDING})

-- name: prune_signals
-- L43: for sagas that never came. Those of a saga that has begun go with its record.
delete from {schema}.signal as g using {schema}.scope as s
where s.id = g.scope_id and g.sent_at < clock_timestamp() - s.retain
  and not exists (select from {schema}.record as r where r.key = g.key)
