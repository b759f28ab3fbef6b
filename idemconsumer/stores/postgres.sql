-- Every statement that the store and its neighbours send, by name. {schema} is the configured schema.
-- Parameters are psycopg's; paste a query into EXPLAIN with them filled in.

-- name: begin
-- The level is asked for whatever the database prefers (R1); connections are read-only outside of this.
begin isolation level read committed read write

-- name: gate
-- Groups that take the same rows go one at a time (G3). In a space of its own: keys are locked by one bigint. It comes
-- before lock_timeout is shortened, since waiting here is what is wanted.
select pg_advisory_xact_lock(1768186979, %(gate)s)

-- name: open
-- The transaction's mark, read again by the seal. Local to the transaction: a ROLLBACK erases it.
select set_config('idemconsumer.open', %(token)s, true), set_config('lock_timeout', %(lock_timeout)s, true)

-- name: claim
-- See the function (migrations/0004). What it returns was not claimed.
select * from {schema}.claim(E'{{%s}}', '{{%s}}', E'{{%s}}', %d::smallint)

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

-- name: register_worker
insert into {schema}.worker (name, lease, until)
values (%(name)s, make_interval(secs => %(lease)s), clock_timestamp() + make_interval(secs => %(lease)s))
returning id

-- name: renew_worker
-- Zero rows: the lease was lost, and with it every saga (L5).
update {schema}.worker set until = clock_timestamp() + lease where id = %(worker)s and until > clock_timestamp()
returning id

-- name: forget_workers
delete from {schema}.worker as w where w.id = %(worker)s
    or (w.until < clock_timestamp() - interval '1 day' and not exists (select from {schema}.saga where worker = w.id))

-- name: begin_saga
insert into {schema}.saga (key, scope_id, handler, state, token, worker, due, attempt, version, source, position,
    message_id, body, headers, started_at)
values (%(key)s, %(scope)s, %(handler)s, 1, nextval('{schema}.saga_token'), %(worker)s, clock_timestamp(), 1,
    %(version)s, %(source)s, %(position)s, %(message_id)s, %(body)s, %(headers)s, clock_timestamp())
returning token

-- name: take_sagas
-- Due and nobody's, or stale: its worker's row is gone, its deadline is over, or lies more than one lease ahead (the
-- clock stepped back). What is ours and not held was taken by a statement whose answer was lost. SKIP LOCKED passes
-- over sagas with an open step, whose owner may still be alive (L2). The deadline is read by a subquery: when a rival
-- has just taken the row, Postgres checks the conditions again on its new version, and a join would then still offer
-- the old owner's lease, which does not match, so that the rival's saga looked like nobody's.
with candidate as materialized (
    select s.key, s.worker is not null as stale from {schema}.saga as s
    where s.handler = any(%(handlers)s) and s.parked is null
      and (%(key)s::bytea is null or s.key = %(key)s)
      and case when s.worker is null then s.due <= clock_timestamp()
               when s.worker = %(worker)s then not s.key = any(%(held)s)
               else not exists (select from {schema}.worker as w where w.id = s.worker
                   and w.until >= clock_timestamp() and w.until <= clock_timestamp() + w.lease) end
    order by s.due limit %(limit)s for update of s skip locked
)
update {schema}.saga as s
set worker = %(worker)s, token = greatest(s.token + 1, nextval('{schema}.saga_token')),
    -- A step that finished under the last token makes this the first attempt again; an undo that only began (4) does not.
    attempt = case when exists (select from {schema}.step
                                where key = s.key and finished_at is not null and state <> 4 and token = s.token)
                   then 1 else s.attempt + 1 end
from candidate as c where s.key = c.key
returning s.key, s.handler, s.token, s.state, s.attempt, s.version, s.rejection, s.source, s.position, s.message_id,
    s.body, s.headers, (select name from {schema}.scope where id = s.scope_id), c.stale

-- name: retake_saga
-- From oneself, after a lost COMMIT. The row lock waits for whatever is still in flight with the old token.
update {schema}.saga as s
set token = greatest(s.token + 1, nextval('{schema}.saga_token'))
where s.key = %(key)s and s.worker = %(worker)s and s.token = coalesce(%(token)s::bigint, s.token)
returning s.key, s.handler, s.token, s.state, s.attempt, s.version, s.rejection, s.source, s.position, s.message_id,
    s.body, s.headers, (select name from {schema}.scope where id = s.scope_id), false

-- name: fence
-- Held to COMMIT, so a takeover waits for an open step, or skips it. No row: fenced (L2).
select 1 from {schema}.saga
where key = %(key)s and token = %(token)s and worker = %(worker)s and state = %(state)s for share

-- name: own
-- As `fence`, for what ends or changes the phase: waits for all open steps.
select 1 from {schema}.saga
where key = %(key)s and token = %(token)s and worker = %(worker)s and state = %(state)s for update

-- name: steps
select name, kind, state, has_undo, overlapped, position, attempt, output, content_type
from {schema}.step where key = %(key)s order by position nulls last, started_at

-- name: begin_step
-- The checkpoint comes first: a COMMIT inside the function then fails at the guard (L3).
insert into {schema}.step (key, name, kind, state, has_undo, token, started_at)
values (%(key)s, %(name)s, %(kind)s, %(state)s, %(has_undo)s, %(token)s, clock_timestamp())
on conflict (key, name) do update
set state = excluded.state, token = excluded.token, attempt = step.attempt + 1
returning attempt

-- name: finish_step
insert into {schema}.step (key, name, kind, state, has_undo, overlapped, position, token, output, content_type,
    started_at, finished_at)
values (%(key)s, %(name)s, %(kind)s, %(state)s, %(has_undo)s, %(overlapped)s, nextval('{schema}.saga_token'),
    %(token)s, %(output)s, %(content_type)s, clock_timestamp(), clock_timestamp())
on conflict (key, name) do update
set state = excluded.state, overlapped = excluded.overlapped, position = excluded.position, token = excluded.token,
    output = excluded.output, content_type = excluded.content_type, finished_at = excluded.finished_at

-- name: finish_undo
update {schema}.step set state = 5, token = %(token)s, finished_at = clock_timestamp()
where key = %(key)s and name = %(name)s

-- name: open_intents
-- In a statement after the row lock: with NOT EXISTS in one statement an intent that was committing passed (L7).
select count(*) from {schema}.step where key = %(key)s and state = 1

-- name: set_undoing
update {schema}.saga set state = 2, rejection = %(rejection)s, attempt = 1 where key = %(key)s

-- name: set_record
update {schema}.record set state = %(state)s, changed_at = clock_timestamp() where key = %(key)s

-- name: end_saga
delete from {schema}.saga where key = %(key)s

-- name: release_saga
update {schema}.saga
set worker = null, due = clock_timestamp() + make_interval(secs => %(delay)s), error = coalesce(%(error)s, error),
    attempt = attempt - %(back)s
where key = %(key)s

-- name: park_saga
update {schema}.saga set worker = null, parked = %(reason)s, error = %(error)s where key = %(key)s

-- name: prune_steps
delete from {schema}.step where key = any(%(keys)s)

-- name: saga_list
-- What runs, waits for its next attempt, or waits for a person (dead). Stale: as take_sagas sees it.
select encode(s.key, 'hex') as key, c.name as scope, s.handler,
    case when s.parked is not null then 'dead' when s.state = 2 then 'undoing' else 'processing' end as state,
    s.parked, w.name as owner, s.token, s.attempt, s.due, s.worker is not null and (w.id is null
        or w.until < clock_timestamp() or w.until > clock_timestamp() + w.lease) as stale,
    (select name from {schema}.step where key = s.key and position is not null order by position desc limit 1)
        as recovery_point,
    s.version, s.error, s.source, s.position, s.message_id, s.started_at
from {schema}.saga as s
join {schema}.scope as c on c.id = s.scope_id
left join {schema}.worker as w on w.id = s.worker
where (%(handler)s::text is null or s.handler = %(handler)s)
  and (%(key)s::bytea is null or s.key = %(key)s)
  and (%(state)s::text is null
       or %(state)s = case when s.parked is not null then 'dead' when s.state = 2 then 'undoing' else 'processing' end)
  and (not %(stale)s or s.worker is not null and (w.id is null
       or w.until < clock_timestamp() or w.until > clock_timestamp() + w.lease))
order by s.started_at desc limit %(limit)s

-- name: saga_keys
-- Records by the beginning of their key, as a range of the primary key.
select r.key from {schema}.record as r where r.key between %(low)s and %(high)s order by r.key limit %(limit)s

-- name: scopes
select name from {schema}.scope

-- name: saga_record
select c.name as scope, r.state, r.changed_at, e.body as result
from {schema}.record as r
join {schema}.scope as c on c.id = r.scope_id
left join {schema}.result as e on e.key = r.key
where r.key = %(key)s

-- name: saga_steps
select name, kind, state, has_undo, overlapped, token, attempt, output, started_at, finished_at
from {schema}.step where key = %(key)s order by started_at, position nulls last

-- name: lock_saga
-- Waits for open steps; from here on nobody takes it. Held: by a worker whose lease is not over.
select s.state, s.rejection, w.name as owner, s.worker is not null and w.until >= clock_timestamp()
    and w.until <= clock_timestamp() + w.lease as held
from {schema}.saga as s left join {schema}.worker as w on w.id = s.worker
where s.key = %(key)s for update of s

-- name: resume_saga
-- Nobody's and due now, with all attempts before it again. The token is new: its last owner may only be frozen.
update {schema}.saga
set token = greatest(token + 1, nextval('{schema}.saga_token')), parked = null, worker = null, due = clock_timestamp(), attempt = 0, state = %(state)s,
    version = coalesce(%(version)s, version), rejection = coalesce(rejection, %(rejection)s)
where key = %(key)s

-- name: forget_dead
-- A person has decided, so it is put aside no longer.
delete from {schema}.dead_letter where key = %(key)s
