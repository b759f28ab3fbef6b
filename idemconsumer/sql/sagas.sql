-- Sagas: leases, steps and how they end. queries.py describes the format: {schema} is the configured schema, {UNDOING}
-- the number stored for that state, {held} the text of that fragment.

-- fragment: held
-- Saga `s` has a worker with an unexpired lease. A deadline more than one lease ahead does not count: the clock has
-- stepped back. This is a subquery because of a race: when a rival has just taken the row, Postgres rechecks the
-- conditions on the row's new version. A join would still supply the old owner's lease, so the rival's saga would look
-- free.
exists (select from {schema}.worker as w
    where w.id = s.worker and w.until >= clock_timestamp() and w.until <= clock_timestamp() + w.lease)

-- fragment: progressed
-- L10: a step of saga `s` has finished under its fence token, so the next attempt counts as the first. An undo
-- that has only begun does not count.
exists (select from {schema}.step
    where key = s.key and finished_at is not null and state <> {UNDO_INTENT} and token = s.token)

-- fragment: leased_saga
-- The columns of a LeasedSaga, from saga `s`.
s.key, s.handler, s.token, s.state, s.attempt, s.version, s.rejection, s.source, s.position, s.message_id, s.body,
    s.headers, (select name from {schema}.scope where id = s.scope_id), s.stale

-- name: register_worker
insert into {schema}.worker (name, lease, until)
values (%(name)s, make_interval(secs => %(lease)s), clock_timestamp() + make_interval(secs => %(lease)s))
returning id

-- name: renew_worker
-- Zero rows: the lease was lost, and with it every saga (L5). The server's clock decides (R2).
update {schema}.worker set until = clock_timestamp() + lease where id = %(worker)s and until > clock_timestamp()
returning id

-- name: forget_workers
delete from {schema}.worker as w where w.id = %(worker)s
    or (w.until < clock_timestamp() - interval '1 day' and not exists (select from {schema}.saga where worker = w.id))

-- name: begin_sagas
-- For the keys that `claim` has just inserted.
insert into {schema}.saga (key, scope_id, handler, state, token, worker, due, attempt, version, source, position,
    message_id, body, headers, started_at)
select key, (select id from {schema}.scope where name = w.scope), handler, {PROCESSING}, nextval('{schema}.saga_token'),
    worker, clock_timestamp(), 1, version, source, position, message_id, body, headers, clock_timestamp()
from unnest(%(key)s::bytea[], %(scope)s::text[], %(handler)s::text[], %(worker)s::bigint[], %(version)s::text[],
    %(source)s::text[], %(position)s::text[], %(message_id)s::text[], %(body)s::bytea[], %(headers)s::bytea[])
    as w (key, scope, handler, worker, version, source, position, message_id, body, headers)
returning key, '', token

-- name: own_sagas
select key, token from {schema}.saga where worker = %(worker)s and (%(key)s::bytea is null or key = %(key)s)

-- name: take_sagas
-- Takes sagas that are due and have no owner, or that are stale: their worker no longer holds them. Of our own sagas it
-- takes only `unheld`, and only under the fence token with which they were seen: one that has been taken again
-- meanwhile has a new token. That costs no attempt, since none was lost. SKIP LOCKED passes over sagas with an open
-- step, since the owner may still be alive (L2). Handlers of other apps may have the same name (L18).
with candidate as materialized (
    select s.key, s.worker, s.token, s.attempt, s.stale or coalesce(s.worker <> %(worker)s, false) as stale
    from {schema}.saga as s
    where s.handler = any(%(handlers)s) and s.parked is null
      and starts_with((select name from {schema}.scope where id = s.scope_id), %(scopes)s)
      and (%(key)s::bytea is null or s.key = %(key)s)
      and case when s.worker is null then s.due <= clock_timestamp()
               when s.worker = %(worker)s then (s.key, s.token) in (
                   select * from unnest(%(unheld)s::bytea[], %(tokens)s::bigint[]))
               else not {held} end
    order by s.due limit %(limit)s for update of s skip locked
), taken as (
    update {schema}.saga as s
    set worker = %(worker)s, stale = c.stale, token = greatest(s.token + 1, nextval('{schema}.saga_token')),
        attempt = case when {progressed} then 1
                       else s.attempt + (c.worker is distinct from %(worker)s)::integer end
    from candidate as c where s.key = c.key
    returning s.*
), noted as (
    insert into {schema}.history (key, at, what, owner, token, attempt)
    select key, clock_timestamp(), what, (select name from {schema}.worker where id = e.worker), token, attempt from (
        select key, 'lost' as what, worker, token, attempt from candidate where worker <> %(worker)s
        union all select key, 'taken', worker, token, attempt from taken
    ) as e order by token
)
select {leased_saga}
from taken as s

-- name: await_saga
-- Waits for writes still in flight under one of our fence tokens.
select 1 from {schema}.saga where key = %(key)s and worker = %(worker)s for update

-- name: retake_saga
-- A takeover from oneself, after a lost COMMIT. A separate statement after `await_saga`, so that its snapshot shows
-- what was in flight. Attempts are counted as in `take_sagas`.
with taken as (
    update {schema}.saga as s
    set token = greatest(s.token + 1, nextval('{schema}.saga_token')),
        attempt = case when {progressed} then 1 else s.attempt end
    where s.key = %(key)s and s.worker = %(worker)s and s.token = coalesce(%(token)s::bigint, s.token)
    returning s.*
), noted as (
    insert into {schema}.history (key, at, what, owner, token, attempt)
    select key, clock_timestamp(), 'retaken', (select name from {schema}.worker where id = %(worker)s), token, attempt
    from taken
)
select {leased_saga}
from taken as s

-- name: steps
select name, kind, state, has_undo, overlapped, position, attempt, output, content_type
from {schema}.step where key = %(key)s order by position nulls last, started_at

-- name: begin_step
-- See the function (migrations/0005). Like `begin_steps`, but it waits for the saga's row.
select {schema}.begin_step(%(seal)s, %(lock_timeout)s, %(key)s, %(token)s, %(worker)s, %(phase)s::smallint, %(name)s,
    %(kind)s::smallint, %(state)s::smallint, %(has_undo)s)

-- name: finish_step
-- See the function. Runs in the transaction that began the step, which holds the fence, and seals it too.
select {schema}.finish_step(%(seal)s, %(key)s, %(name)s, %(state)s::smallint, %(overlapped)s, %(token)s, %(output)s,
    %(content_type)s)

-- name: begin_steps
-- Each row is fenced separately, and writes nothing unless its saga's row matches (L2). That row is locked by key in
-- LATERAL … OFFSET 0, an index lookup even if it was planned on empty tables (G5). It is passed over when a rival has
-- locked it: a shared commit waits for no saga. A checkpoint comes before its function, so that a COMMIT inside the
-- function fails at the guard (L3). A step that has ended is not begun again, even by its owner.
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
    undo_at = case when excluded.state = {UNDO_INTENT} then coalesce(step.undo_at, excluded.started_at) end
where (step.state, excluded.state)
    in (({INTENT}, {INTENT}), ({DONE}, {UNDO_INTENT}), ({UNDO_INTENT}, {UNDO_INTENT}))
returning key, name, attempt

-- name: finish_steps
-- Fenced like `begin_steps`. Forward, only steps that have not ended; backward, only steps that are being undone.
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
    undone_at = case when excluded.state = {UNDONE} then excluded.finished_at end
where case when excluded.state = {UNDONE} then step.state = {UNDO_INTENT} else step.position is null end
returning key, name, attempt

-- name: fence
-- Held until COMMIT, so a takeover waits for an open step, or skips it. No row: fenced (L2).
select 1 from {schema}.saga
where key = %(key)s and token = %(token)s and worker = %(worker)s and state = %(phase)s for share

-- name: fence_whole
-- Like `fence`, for writes that end the saga or change its phase: waits for all open steps.
select 1 from {schema}.saga
where key = %(key)s and token = %(token)s and worker = %(worker)s and state = %(phase)s for update

-- name: open_intents
-- A separate statement after the row lock: NOT EXISTS in the same one would miss an intent that was committing (L7).
select count(*) from {schema}.step where key = %(key)s and state = {INTENT}

-- name: set_undoing
with undoing as (
    update {schema}.saga set state = {UNDOING}, rejection = %(rejection)s, attempt = 1 where key = %(key)s
    returning key, worker, token
)
insert into {schema}.history (key, at, what, owner, token, detail)
select key, clock_timestamp(), 'undoing', (select name from {schema}.worker where id = u.worker), token,
    convert_from(%(rejection)s, 'utf8')
from undoing as u

-- name: set_record
update {schema}.record set state = %(state)s, changed_at = clock_timestamp() where key = %(key)s

-- name: no_scans
-- Sent before `end_sagas`, for the rest of a transaction in which no handler runs. UPDATE and DELETE cannot find their
-- rows through LATERAL, and a plan made on empty tables would keep scanning whole tables (G5).
select set_config('enable_seqscan', 'off', true)

-- name: end_sagas
-- Fenced like `begin_steps`, but FOR UPDATE: a saga with an open step is passed over.
with fenced as materialized (
    select w.key, w.final
    from unnest(%(key)s::bytea[], %(token)s::bigint[], %(worker)s::bigint[], %(phase)s::smallint[],
        %(final)s::smallint[]) as w (key, token, worker, phase, final)
    cross join lateral (
        select 1 from {schema}.saga where key = w.key and token = w.token and worker = w.worker and state = w.phase
        offset 0 for update skip locked
    ) as fence
), ended as (
    update {schema}.record as r
    set state = (select final from fenced where fenced.key = r.key), changed_at = clock_timestamp()
    where r.key = any(array(select key from fenced))
)
delete from {schema}.saga as s where s.key = any(array(select key from fenced))
returning s.key, '', s.attempt

-- name: end_saga
-- For a saga with its row already locked.
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
-- Only for a saga that has not ended. A repeat of its last note is not written: there may be many redeliveries.
insert into {schema}.history (key, at, what, detail)
select %(key)s, clock_timestamp(), %(what)s::text, %(detail)s::text
where exists (select from {schema}.saga where key = %(key)s)
  and not exists (select from (select what, detail from {schema}.history where key = %(key)s order by id desc limit 1)
                      as last where last.what = %(what)s::text and last.detail is not distinct from %(detail)s::text)
