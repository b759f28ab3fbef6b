-- Joined mode: the transaction, claims, attempts, dead letters and retention, one statement per name.
-- queries.py describes the format: {schema} is the configured schema, {COMPLETED} the number stored for that state.

-- name: begin
-- The isolation level is explicit, whatever the database's default (R1). Outside of this, connections are read-only.
begin isolation level read committed read write

-- name: gate
-- Groups that change the same rows take turns (G3). The two-part lock has a space of its own: keys are locked by one
-- bigint. The wait is intended and so has no timeout: the groups ahead have one. `open` sets lock_timeout again.
set local statement_timeout = 0; set local lock_timeout = 0;
select pg_advisory_xact_lock(1768186979, %(gate)s);
set local statement_timeout to default

-- name: open
-- The value that the seal compares (J3). Local to the transaction: a ROLLBACK erases it.
select set_config('idemconsumer.open', %(seal)s, true), set_config('lock_timeout', %(lock_timeout)s, true)

-- name: scope
-- The id of a scope, created on first use. `retain` is that of the handler that was started last.
insert into {schema}.scope (name, retain) values (%(name)s, make_interval(secs => %(retain)s))
on conflict (name) do update set retain = excluded.retain
returning id

-- name: claim
-- The insert is in the function (migrations/0004). What it returns was not claimed.
select * from {schema}.claim(%(keys)s::bytea[], %(scopes)s::integer[], %(fingerprints)s::bytea[], %(state)s::smallint)

-- name: read
-- The records that the claim did not insert, in a separate statement and so with a new snapshot (R3). LATERAL …
-- OFFSET 0 keeps this an index lookup for each key even when it was planned while the table was empty (G5).
select w.key, r.state, r.fingerprint, s.body, s.content_type
from unnest(%(keys)s::bytea[]) as w (key)
cross join lateral (select state, fingerprint from {schema}.record where key = w.key offset 0) as r
left join lateral (select body, content_type from {schema}.result where key = w.key offset 0) as s on true

-- name: store_results
insert into {schema}.result (key, body, content_type)
select * from unnest(%(keys)s::bytea[], %(bodies)s::bytea[], %(types)s::text[])

-- name: forget_attempts
delete from {schema}.attempt where key = any(%(keys)s::bytea[])

-- name: seal
-- The last statement before COMMIT: raises unless this is still the transaction that was opened (J3).
select {schema}.seal(%(seal)s)

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

-- name: dead_letter
-- Another arrival only raises the count, so that a poison message that keeps arriving stays one row.
insert into {schema}.dead_letter
    (identity, handler, scope, source, position, reason, error, key, body, headers, attempts, first_at, last_at)
values
    (%(identity)s, %(handler)s, %(scope)s, %(source)s, %(position)s, %(reason)s, %(error)s, %(key)s, %(body)s,
     %(headers)s, %(attempts)s, clock_timestamp(), clock_timestamp())
on conflict (identity) do update
set arrivals = dead_letter.arrivals + 1, last_at = excluded.last_at
returning id

-- name: count_dead
update {schema}.dead_letter set arrivals = arrivals + 1, last_at = clock_timestamp()
where id = (select max(id) from {schema}.dead_letter where key = %(key)s)

-- name: blocks
select pg_relation_size('{schema}.record') / current_setting('block_size')::bigint

-- name: prune
-- R11: final records in a range of blocks that are past their scope's retention. DEAD ones wait for a person.
delete from {schema}.record as r using {schema}.scope as s
where r.ctid >= %(low)s::tid and r.ctid < %(high)s::tid
  and s.id = r.scope_id and r.state in ({COMPLETED}, {FAILED}) and r.changed_at < clock_timestamp() - s.retain
returning r.key

-- name: prunable
select count(*) from {schema}.record as r join {schema}.scope as s on s.id = r.scope_id
where r.ctid >= %(low)s::tid and r.ctid < %(high)s::tid
  and r.state in ({COMPLETED}, {FAILED}) and r.changed_at < clock_timestamp() - s.retain

-- name: prune_results
delete from {schema}.result where key = any(%(keys)s)

-- name: prune_steps
with history as (delete from {schema}.history where key = any(%(keys)s))
delete from {schema}.step where key = any(%(keys)s)

-- name: prune_attempts
-- Leftovers: another worker applied the message, or it is gone from the broker.
delete from {schema}.attempt as a using {schema}.scope as s
where s.id = a.scope_id and a.changed_at < clock_timestamp() - s.retain
