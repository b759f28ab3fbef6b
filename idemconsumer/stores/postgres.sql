-- Every statement that the store and its neighbours send, by name. {schema} is the configured schema.
-- Parameters are psycopg's; paste a query into EXPLAIN with them filled in.

-- name: begin
-- The level is asked for whatever the database prefers (R1); connections are read-only outside of this.
begin isolation level read committed read write

-- name: open
-- The transaction's mark, read again by the seal. Local to the transaction: a ROLLBACK erases it.
select set_config('idemconsumer.open', %(token)s, true), set_config('lock_timeout', %(lock_timeout)s, true)

-- name: claim
-- One atomic insert for a whole group (R3), in its final state (J2). The advisory lock comes first, in the same
-- statement: without it the insert would block behind an uncommitted rival and pin this connection (J1).
insert into {schema}.record (key, scope_id, state, fingerprint, changed_at)
select c.key, c.scope_id, %(state)s, c.fingerprint, clock_timestamp()
from unnest(%(keys)s::bytea[], %(scopes)s::int[], %(fingerprints)s::bytea[], %(locks)s::bigint[])
     as c (key, scope_id, fingerprint, lock)
where pg_try_advisory_xact_lock(c.lock)
on conflict do nothing
returning key

-- name: read
-- What the claim did not insert, in a statement and so a snapshot of its own (R3). LATERAL … OFFSET 0 keeps this an
-- index lookup for each key even when it was planned while the table was empty (G5).
select w.key, r.state, r.fingerprint, s.body, s.content_type
from unnest(%(keys)s::bytea[]) as w (key)
cross join lateral (select state, fingerprint from {schema}.record where key = w.key offset 0) as r
left join lateral (select body, content_type from {schema}.result where key = w.key offset 0) as s on true

-- name: store_results
insert into {schema}.result (key, body, content_type)
select * from unnest(%(keys)s::bytea[], %(bodies)s::bytea[], %(types)s::text[])

-- name: forget_attempts
delete from {schema}.attempt where key = any(%(keys)s)

-- name: seal
-- The last statement before COMMIT: raises unless this is still the transaction that was opened (J3).
select {schema}.seal(%(token)s)

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
-- A second arrival only counts, so that a poisoned message that keeps coming is one row.
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

-- name: scope
-- The id of a scope, made on first sight. `retain` follows the handler that was started last.
insert into {schema}.scope (name, retain) values (%(name)s, make_interval(secs => %(retain)s))
on conflict (name) do update set retain = excluded.retain
returning id

-- name: blocks
select pg_relation_size('{schema}.record') / current_setting('block_size')::bigint

-- name: prune
-- Final records of a range of blocks that are past their scope's retention. DEAD ones wait for a person.
delete from {schema}.record as r using {schema}.scope as s
where r.ctid >= %(low)s::tid and r.ctid < %(high)s::tid
  and s.id = r.scope_id and r.state in (3, 4) and r.changed_at < clock_timestamp() - s.retain
returning r.key

-- name: prunable
select count(*) from {schema}.record as r join {schema}.scope as s on s.id = r.scope_id
where r.ctid >= %(low)s::tid and r.ctid < %(high)s::tid
  and r.state in (3, 4) and r.changed_at < clock_timestamp() - s.retain

-- name: prune_results
delete from {schema}.result where key = any(%(keys)s)

-- name: prune_attempts
-- What nobody came back for: the message was applied by another worker, or is gone from the broker.
delete from {schema}.attempt as a using {schema}.scope as s
where s.id = a.scope_id and a.changed_at < clock_timestamp() - s.retain

-- name: enqueue
select {schema}.publish_bytes(%(name)s, %(body)s, %(key)s, %(headers)s)

-- name: take
-- The next visible messages. The token makes each delivery one of a kind: settling an expired one hits nothing.
with next as materialized (
    select id from {schema}.queue
    where name = %(name)s and visible_at <= clock_timestamp()
    order by id limit %(limit)s for update skip locked
)
update {schema}.queue as q
set deliveries = q.deliveries + 1, token = nextval('{schema}.queue_token'),
    visible_at = clock_timestamp() + make_interval(secs => %(visibility)s)
from next where q.id = next.id
returning q.id, q.token, q.deliveries, q.message_id, q.body, q.headers

-- name: finish
-- Tokens are unique over all deliveries, so two arrays need no pairing.
delete from {schema}.queue where id = any(%(ids)s) and token = any(%(tokens)s)

-- name: extend
update {schema}.queue set visible_at = clock_timestamp() + make_interval(secs => %(visibility)s)
where id = any(%(ids)s) and token = any(%(tokens)s)

-- name: give_back
-- Never started: visible at once, and as if it had not been delivered.
update {schema}.queue set visible_at = clock_timestamp(), deliveries = greatest(deliveries - 1, 0), token = null
where id = any(%(ids)s) and token = any(%(tokens)s)

-- name: waiting
select count(*) from {schema}.queue where name = %(name)s

-- name: dead_list
select id, handler, source, position, reason, error, attempts, arrivals, first_at, last_at
from {schema}.dead_letter
where (%(handler)s::text is null or handler = %(handler)s) and (%(reason)s::text is null or reason = %(reason)s)
order by id desc limit %(limit)s

-- name: dead_show
select id, handler, scope, source, position, reason, error, key, body, headers, attempts, arrivals, first_at, last_at
from {schema}.dead_letter where id = %(id)s

-- name: dead_counts
select handler, reason, count(*) as letters, sum(arrivals)::bigint as arrivals
from {schema}.dead_letter
group by handler, reason
order by letters desc, handler, reason
