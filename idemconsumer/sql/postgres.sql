-- Every statement that the store and its neighbours send, by name. {schema} is the configured schema.
-- Parameters are psycopg's; paste a query into EXPLAIN with them filled in.

-- name: begin
-- The level is asked for whatever the database prefers (R1); connections are read-only outside of this.
begin isolation level read committed read write

-- name: gate
-- Groups that take the same rows go one at a time (G3). In a space of its own: keys are locked by one bigint. The wait
-- is what is wanted and so has no bound of its own: whoever is before us has one. `open` sets lock_timeout again.
set local statement_timeout = 0; set local lock_timeout = 0;
select pg_advisory_xact_lock(1768186979, %(gate)s);
set local statement_timeout to default

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
delete from {schema}.attempt where key = any(%(keys)s::bytea[])

-- name: seal
-- The last statement before COMMIT: raises unless this is still the transaction that was opened (J3).
select {schema}.seal(%(token)s)

-- name: mark_attempts
-- Begun, and no attempt counted. In the order of the keys: two workers that mark the same ones must not deadlock.
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
-- R11: final records of a range of blocks, past their scope's retention. DEAD ones wait for a person.
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
-- The next visible messages; what others are taking is passed over (P2).
-- The token makes each delivery one of a kind: settling an expired one hits nothing (P1).
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
-- Never started: visible at once, and as if it had not been delivered (P4).
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
-- Zero rows: the lease was lost, and with it every saga (L5). By the server's clock (R2).
update {schema}.worker set until = clock_timestamp() + lease where id = %(worker)s and until > clock_timestamp()
returning id

-- name: forget_workers
delete from {schema}.worker as w where w.id = %(worker)s
    or (w.until < clock_timestamp() - interval '1 day' and not exists (select from {schema}.saga where worker = w.id))

-- name: begin_sagas
-- Of what `claim` has just inserted.
insert into {schema}.saga (key, scope_id, handler, state, token, worker, due, attempt, version, source, position,
    message_id, body, headers, started_at)
select key, (select id from {schema}.scope where name = w.scope), handler, 1, nextval('{schema}.saga_token'), worker,
    clock_timestamp(), 1, version, source, position, message_id, body, headers, clock_timestamp()
from unnest(%(key)s::bytea[], %(scope)s::text[], %(handler)s::text[], %(worker)s::bigint[], %(version)s::text[],
    %(source)s::text[], %(position)s::text[], %(message_id)s::text[], %(body)s::bytea[], %(headers)s::bytea[])
    as w (key, scope, handler, worker, version, source, position, message_id, body, headers)
returning key, '', token

-- name: take_sagas
-- Due and nobody's, or stale: its worker's row is gone, its deadline is over, or lies more than one lease ahead (the
-- clock stepped back). Of what is ours only `unheld`, and only under the token with which it was seen: whoever holds
-- it by now has another one. It costs no attempt, since none was lost. SKIP LOCKED passes over sagas with an open step,
-- whose owner may still be alive (L2). The deadline is read by a subquery: when a rival has just taken the row, Postgres
-- checks the conditions again on its new version, and a join would then still offer the old owner's lease, which does
-- not match, so that the rival's saga looked like nobody's. Handlers of other apps may have the same name (L18).
with candidate as materialized (
    select s.key, s.worker, s.token, s.attempt, s.stale or coalesce(s.worker <> %(worker)s, false) as stale
    from {schema}.saga as s
    where s.handler = any(%(handlers)s) and s.parked is null
      and starts_with((select name from {schema}.scope where id = s.scope_id), %(scopes)s)
      and (%(key)s::bytea is null or s.key = %(key)s)
      and case when s.worker is null then s.due <= clock_timestamp()
               when s.worker = %(worker)s then (s.key, s.token) in (
                   select * from unnest(%(unheld)s::bytea[], %(tokens)s::bigint[]))
               else not exists (select from {schema}.worker as w where w.id = s.worker
                   and w.until >= clock_timestamp() and w.until <= clock_timestamp() + w.lease) end
    order by s.due limit %(limit)s for update of s skip locked
), taken as (
    update {schema}.saga as s
    set worker = %(worker)s, stale = c.stale, token = greatest(s.token + 1, nextval('{schema}.saga_token')),
        -- L10: a step that finished under the last token makes this the first attempt again; an undo that only began (4)
        -- does not.
        attempt = case when exists (select from {schema}.step
                                    where key = s.key and finished_at is not null and state <> 4 and token = s.token)
                       then 1 else s.attempt + (c.worker is distinct from %(worker)s)::integer end
    from candidate as c where s.key = c.key
    returning s.*
), noted as (
    insert into {schema}.history (key, at, what, owner, token, attempt)
    select key, clock_timestamp(), what, (select name from {schema}.worker where id = e.worker), token, attempt from (
        select key, 'lost' as what, worker, token, attempt from candidate where worker <> %(worker)s
        union all select key, 'taken', worker, token, attempt from taken
    ) as e order by token
)
select s.key, s.handler, s.token, s.state, s.attempt, s.version, s.rejection, s.source, s.position, s.message_id,
    s.body, s.headers, (select name from {schema}.scope where id = s.scope_id), s.stale
from taken as s

-- name: own_sagas
select key, token from {schema}.saga where worker = %(worker)s and (%(key)s::bytea is null or key = %(key)s)

-- name: await_saga
-- Waits for whatever is still in flight with a token of ours.
select 1 from {schema}.saga where key = %(key)s and worker = %(worker)s for update

-- name: retake_saga
-- From oneself, after a lost COMMIT. In a statement after `await_saga`: its snapshot shows what was in flight. Attempts
-- as in `take_sagas`.
with taken as (
    update {schema}.saga as s
    set token = greatest(s.token + 1, nextval('{schema}.saga_token')),
        attempt = case when exists (select from {schema}.step
                                    where key = s.key and finished_at is not null and state <> 4 and token = s.token)
                       then 1 else s.attempt end
    where s.key = %(key)s and s.worker = %(worker)s and s.token = coalesce(%(token)s::bigint, s.token)
    returning s.*
), noted as (
    insert into {schema}.history (key, at, what, owner, token, attempt)
    select key, clock_timestamp(), 'retaken', (select name from {schema}.worker where id = %(worker)s), token, attempt
    from taken
)
select s.key, s.handler, s.token, s.state, s.attempt, s.version, s.rejection, s.source, s.position, s.message_id,
    s.body, s.headers, (select name from {schema}.scope where id = s.scope_id), s.stale
from taken as s

-- name: fence
-- Held to COMMIT, so a takeover waits for an open step, or skips it. No row: fenced (L2).
select 1 from {schema}.saga
where key = %(key)s and token = %(token)s and worker = %(worker)s and state = %(phase)s for share

-- name: own
-- As `fence`, for what ends or changes the phase: waits for all open steps.
select 1 from {schema}.saga
where key = %(key)s and token = %(token)s and worker = %(worker)s and state = %(phase)s for update

-- name: steps
select name, kind, state, has_undo, overlapped, position, attempt, output, content_type
from {schema}.step where key = %(key)s order by position nulls last, started_at

-- name: begin_steps
-- Each row is fenced by itself, and writes nothing without its saga's row (L2). It is locked by its key in LATERAL …
-- OFFSET 0, an index lookup whatever the plan was made on (G5), and passed over when somebody has locked it: a shared
-- commit waits for no one saga. A checkpoint comes before its function, so that a COMMIT inside fails at the guard (L3).
-- What has come to its end is not begun again, whoever asks.
insert into {schema}.step (key, name, kind, state, has_undo, token, started_at)
select w.key, w.name, w.kind, w.state, w.has_undo, w.token, clock_timestamp()
from unnest(%(key)s::bytea[], %(token)s::bigint[], %(worker)s::bigint[], %(phase)s::smallint[], %(name)s::text[],
    %(kind)s::smallint[], %(state)s::smallint[], %(has_undo)s::boolean[])
    as w (key, token, worker, phase, name, kind, state, has_undo)
cross join lateral (
    select 1 from {schema}.saga where key = w.key and token = w.token and worker = w.worker and state = w.phase
    offset 0 for share skip locked
) as fence
on conflict (key, name) do update
set state = excluded.state, token = excluded.token, attempt = step.attempt + 1,
    undo_at = case when excluded.state = 4 then coalesce(step.undo_at, excluded.started_at) end
where (step.state, excluded.state) in ((1, 1), (2, 4), (4, 4))
returning key, name, attempt

-- name: finish_steps
-- Fenced as `begin_steps`. Forward, only what has no end yet; backward (5), only what is being undone.
insert into {schema}.step (key, name, kind, state, has_undo, overlapped, position, token, output, content_type,
    started_at, finished_at)
select w.key, w.name, w.kind, w.state, w.has_undo, w.overlapped, nextval('{schema}.saga_token'), w.token, w.output,
    w.content_type, clock_timestamp(), clock_timestamp()
from unnest(%(key)s::bytea[], %(token)s::bigint[], %(worker)s::bigint[], %(phase)s::smallint[], %(name)s::text[],
    %(kind)s::smallint[], %(state)s::smallint[], %(has_undo)s::boolean[], %(overlapped)s::boolean[],
    %(output)s::bytea[], %(content_type)s::text[])
    as w (key, token, worker, phase, name, kind, state, has_undo, overlapped, output, content_type)
cross join lateral (
    select 1 from {schema}.saga where key = w.key and token = w.token and worker = w.worker and state = w.phase
    offset 0 for share skip locked
) as fence
on conflict (key, name) do update
set state = excluded.state, overlapped = step.overlapped or excluded.overlapped,
    position = coalesce(step.position, excluded.position), token = excluded.token,
    output = coalesce(step.output, excluded.output), content_type = coalesce(step.content_type, excluded.content_type),
    finished_at = coalesce(step.finished_at, excluded.finished_at),
    undone_at = case when excluded.state = 5 then excluded.finished_at end
where case when excluded.state = 5 then step.state = 4 else step.position is null end
returning key, name, attempt

-- name: begin_step
-- See the function (migrations/0005). As `begin_steps`, but it waits for the saga's row.
select {schema}.begin_step(%(mark)s, %(lock_timeout)s, %(key)s, %(token)s, %(worker)s, %(phase)s::smallint, %(name)s,
    %(kind)s::smallint, %(state)s::smallint, %(has_undo)s)

-- name: finish_step
-- See the function. By the transaction that began it, which holds the fence; seals it, too.
select {schema}.finish_step(%(mark)s, %(key)s, %(name)s, %(state)s::smallint, %(overlapped)s, %(token)s, %(output)s,
    %(content_type)s)

-- name: open_intents
-- In a statement after the row lock: with NOT EXISTS in one statement an intent that was committing passed (L7).
select count(*) from {schema}.step where key = %(key)s and state = 1

-- name: set_undoing
with undoing as (
    update {schema}.saga set state = 2, rejection = %(rejection)s, attempt = 1 where key = %(key)s
    returning key, worker, token
)
insert into {schema}.history (key, at, what, owner, token, detail)
select key, clock_timestamp(), 'undoing', (select name from {schema}.worker where id = u.worker), token,
    convert_from(%(rejection)s, 'utf8')
from undoing as u

-- name: set_record
update {schema}.record set state = %(state)s, changed_at = clock_timestamp() where key = %(key)s

-- name: no_scans
-- Sent before `end_sagas`, for the rest of a transaction in which no handler runs: neither UPDATE nor DELETE can find its
-- rows in LATERAL, and planned on empty tables they would read all of them for ever (G5).
select set_config('enable_seqscan', 'off', true)

-- name: end_sagas
-- Fenced as `begin_steps`, but FOR UPDATE: a saga with an open step is passed over.
with own as materialized (
    select w.key, w.final
    from unnest(%(key)s::bytea[], %(token)s::bigint[], %(worker)s::bigint[], %(phase)s::smallint[],
        %(final)s::smallint[]) as w (key, token, worker, phase, final)
    cross join lateral (
        select 1 from {schema}.saga where key = w.key and token = w.token and worker = w.worker and state = w.phase
        offset 0 for update skip locked
    ) as fence
), ended as (
    update {schema}.record as r
    set state = (select final from own where own.key = r.key), changed_at = clock_timestamp()
    where r.key = any(array(select key from own))
)
delete from {schema}.saga as s where s.key = any(array(select key from own))
returning s.key, '', s.attempt

-- name: end_saga
-- Of a saga whose row is locked already.
delete from {schema}.saga where key = %(key)s

-- name: release_saga
with released as (
    update {schema}.saga
    set worker = null, due = clock_timestamp() + make_interval(secs => %(delay)s), error = coalesce(%(error)s, error),
        attempt = attempt - %(back)s, stale = %(stale)s
    where key = %(key)s
    returning key, token, attempt + %(back)s as attempt
)
insert into {schema}.history (key, at, what, owner, token, attempt, detail)
select key, clock_timestamp(), 'released', (select name from {schema}.worker where id = %(worker)s), token, attempt,
    %(error)s
from released

-- name: park_saga
with parked as (
    update {schema}.saga set worker = null, parked = %(reason)s, error = %(error)s where key = %(key)s
    returning key, token, attempt
)
insert into {schema}.history (key, at, what, owner, token, attempt, detail)
select key, clock_timestamp(), 'parked', (select name from {schema}.worker where id = %(worker)s), token, attempt,
    %(reason)s || ': ' || %(error)s
from parked

-- name: note
-- Of a saga that has not ended. What was noted last is not noted again: a redelivery may ask many times.
insert into {schema}.history (key, at, what, detail)
select %(key)s, clock_timestamp(), %(what)s::text, %(detail)s::text
where exists (select from {schema}.saga where key = %(key)s)
  and not exists (select from (select what, detail from {schema}.history where key = %(key)s order by id desc limit 1)
                      as last where last.what = %(what)s::text and last.detail is not distinct from %(detail)s::text)

-- name: prune_steps
with history as (delete from {schema}.history where key = any(%(keys)s))
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
select name, kind, state, has_undo, overlapped, token, attempt, output, started_at, finished_at, undo_at, undone_at
from {schema}.step where key = %(key)s order by started_at, position nulls last

-- name: saga_history
select at, what, owner, token, attempt, detail from {schema}.history where key = %(key)s order by id

-- name: lock_saga
-- Waits for open steps; from here on it cannot be taken (L19).
select 1 from {schema}.saga where key = %(key)s for update

-- name: locked_saga
-- In a statement after the row lock: its snapshot shows who took the saga, and renewed a lease, while that waited. Held:
-- by a worker whose lease is not over.
select s.state, s.rejection, w.name as owner, s.worker is not null and w.until >= clock_timestamp()
    and w.until <= clock_timestamp() + w.lease as held
from {schema}.saga as s left join {schema}.worker as w on w.id = s.worker
where s.key = %(key)s

-- name: resume_saga
-- Nobody's and due now, with all attempts before it again. The token is new: its last owner may only be frozen.
update {schema}.saga
set token = greatest(token + 1, nextval('{schema}.saga_token')), parked = null, worker = null, stale = false,
    due = clock_timestamp(), attempt = 0, state = %(state)s, version = coalesce(%(version)s, version),
    rejection = coalesce(rejection, %(rejection)s)
where key = %(key)s

-- name: forget_dead
-- A person has decided, so it is put aside no longer.
delete from {schema}.dead_letter where key = %(key)s
