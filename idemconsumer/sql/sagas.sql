-- Sagas: leases, steps and how they end. queries.py describes the format: {schema} is the configured schema, {UNDOING}
-- the number stored for that state, {held} the text of that fragment.

-- fragment: held
-- Saga `s` has a worker with an unexpired lease. A deadline more than one lease ahead does not count: the clock was set
-- back. This is a subquery because of a race: when a rival has just taken the row, Postgres rechecks the conditions on
-- the row's new version. A join would still supply the old owner's lease, so the rival's saga would look free.
exists (select from {schema}.worker as w
    where w.id = s.worker and w.until >= clock_timestamp() and w.until <= clock_timestamp() + w.lease)

-- fragment: progressed
-- L10: a step of saga `s` has finished under its fence token, so the next attempt counts as the first. An undo
-- that has only begun does not count.
exists (select from {schema}.step
    where key = s.key and finished_at is not null and state <> {UNDO_INTENT} and token = s.token)

-- fragment: unserved
-- L28. For `grace` no worker has lived that runs the handler of `s` in its version.
not exists (
    select from {schema}.worker as w
    where w.until >= clock_timestamp() - make_interval(secs => %(grace)s)
      and w.runs @> jsonb_build_array(
          jsonb_build_object('app', %(app)s::text, 'handler', s.handler, 'version', s.version))
)

-- fragment: gone
-- L28. Saga `s` has waited for `grace`, and in that time no worker has run its version.
s.due < clock_timestamp() - make_interval(secs => %(grace)s) and {unserved}

-- fragment: served
-- L28. This process runs saga `s` in its version ('*': in any), or holds it already; or its version is gone, so that
-- any process has to report that.
(s.version = '*' or s.worker = %(worker)s or exists (
    select from unnest(%(handlers)s::text[], %(versions)s::text[]) as v (handler, version)
    where v.handler = s.handler and v.version in ('*', coalesce(s.version, ''))
) or {gone})

-- fragment: leased_saga
-- The columns of a LeasedSaga, from saga `s`.
s.key, s.handler, s.token, s.state, s.attempt, s.version, s.rejection, s.source, s.position, s.message_id, s.body,
    s.headers, (select name from {schema}.scope where id = s.scope_id), s.stale, s.delivered, s.suspicion = 2, s.cancel,
    extract(epoch from clock_timestamp() - s.started_at)::float8

-- fragment: of_app
-- Saga `s` belongs to the app (L18), or was moved to it (L31).
starts_with(coalesce(s.app || '/', (select name from {schema}.scope where id = s.scope_id)), %(scopes)s)

-- fragment: ours
-- And this process may run it (L28).
{of_app} and {served}

-- fragment: versions
-- L60. The versions of the waiting sagas, each read by one step through the index. `ready`: those that this process may
-- take, and from when: sagas of a version that is gone only after waiting for `grace`. The same condition as `served`,
-- for waiting sagas.
versions (handler, name) as (
    select v.handler, (
        select coalesce(s.version, '') from {schema}.saga as s
        where s.worker is null and s.parked is null and s.handler = v.handler
        order by coalesce(s.version, '') limit 1)
    from unnest(%(handlers)s::text[]) as v (handler)
    union all
    select v.handler, (
        select coalesce(s.version, '') from {schema}.saga as s
        where s.worker is null and s.parked is null and s.handler = v.handler and coalesce(s.version, '') > v.name
        order by coalesce(s.version, '') limit 1)
    from versions as v where v.name is not null
), ready as materialized (
    select s.handler, s.name, clock_timestamp() - s.grace as until, s.grace from (
        select v.handler, v.name, nullif(v.name, '') as version, case
            when v.name = '*' or exists (
                select from unnest(%(handlers)s::text[], %(versions)s::text[]) as r (handler, version)
                where r.handler = v.handler and r.version in ('*', v.name)
            ) then interval '0' else make_interval(secs => %(grace)s) end as grace
        from versions as v where v.name is not null
    ) as s
    where s.grace = interval '0' or {unserved}
)

-- fragment: owners
-- The workers that hold sagas, each read by one step through the index.
owner (worker) as (
    (select s.worker from {schema}.saga as s where s.worker is not null order by s.worker limit 1)
    union all
    select (select s.worker from {schema}.saga as s where s.worker > o.worker order by s.worker limit 1)
    from owner as o where o.worker is not null
)

-- fragment: taken
-- Gives each `candidate` a new owner and token. A saga that is ours costs no attempt, since no worker was lost. A lost
-- worker costs one only if the saga ran alone (L22; the numbers of `suspicion` are explained in migrations/0005). The
-- keys are given as an array too, so that they are looked up and the table is not scanned.
taken as (
    update {schema}.saga as s
    set worker = %(worker)s, signals = null, stale = s.stale or c.lost, token = greatest(s.token + 1, nextval('{schema}.saga_token')),
        attempt = case when {progressed} then 1
                       else s.attempt + (c.worker is null or c.lost and s.suspicion = 3)::integer end,
        suspicion = case when {progressed} then c.lost::integer
                         when c.lost then least(s.suspicion, 1) + 1
                         else least(s.suspicion, 2) end
    from candidate as c where s.key = c.key and s.key = any(array(select key from candidate))
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

-- name: register_worker
insert into {schema}.worker (name, lease, until, runs, build)
values (%(name)s, make_interval(secs => %(lease)s), clock_timestamp() + make_interval(secs => %(lease)s),
    %(runs)s::jsonb, %(build)s)
returning id

-- name: renew_worker
-- Zero rows: the lease was lost, and with it every saga (L5). The server's clock decides (R2).
update {schema}.worker set until = clock_timestamp() + lease where id = %(worker)s and until > clock_timestamp()
returning id

-- name: forget_workers
-- The handlers that this worker ran stay known for a day, so that a version that is away for a moment does not count as
-- gone (L28).
with ended as (update {schema}.worker set until = clock_timestamp() where id = %(worker)s and until > clock_timestamp())
delete from {schema}.worker as w
where w.until < clock_timestamp() - interval '1 day' and not exists (select from {schema}.saga where worker = w.id)

-- fragment: other_build
-- L29. Worker `w` runs the handler in this version, or did so within `grace`, and has another build than this process
-- and those that were unable to continue saga `s`.
w.build <> %(build)s and w.build <> all(coalesce(s.unable, array[]::text[]))
    and w.until >= clock_timestamp() - make_interval(secs => %(grace)s)
    and w.runs @> jsonb_build_array(
        jsonb_build_object('app', %(app)s::text, 'handler', %(handler)s::text, 'version', %(version)s::text))

-- name: left_to_others
select 1 from {schema}.saga as s, {schema}.worker as w where s.key = %(key)s and {other_build} limit 1

-- name: leave_saga
-- L29. From now on the saga belongs to a live worker of another build, which sees it among its own (L12), whatever
-- else it has in flight. If there was such a worker only within `grace`, it has no owner for a while. A draining worker is not
-- chosen. No row: there is no such worker.
with other as (
    select w.id, w.name, w.build, w.until >= clock_timestamp() and not exists (
            select from {schema}.process as p
            where p.host || ':' || p.pid = w.name and (p.state <> 'running' or p.drain_at is not null)) as live
    from {schema}.saga as s, {schema}.worker as w
    where s.key = %(key)s and {other_build}
    order by live desc, w.id desc limit 1
), left_to as (
    update {schema}.saga as s
    set worker = case when o.live then o.id end, token = greatest(s.token + 1, nextval('{schema}.saga_token')),
        unable = array_append(s.unable, %(build)s::text), error = %(error)s, stale = %(stale)s,
        suspicion = case when %(stale)s then least(s.suspicion, 2) else 0 end,
        attempt = s.attempt - case when o.live then 0 else 1 end,
        due = clock_timestamp() + make_interval(secs => case when s.cancel is null or %(heeded)s then %(delay)s else 0 end)
    from other as o where s.key = %(key)s
    returning s.key, o.live, o.name, o.build, s.attempt
), noted as (
    insert into {schema}.history (key, at, what, owner, token, attempt, detail)
    select key, clock_timestamp(), 'left', (select name from {schema}.worker where id = %(worker)s), %(token)s, attempt,
        case when live then 'to ' || name || ', build ' || build || ': ' else '' end || %(error)s
    from left_to
)
select live from left_to

-- name: begin_sagas
-- Claims the keys, and begins a saga for each that was inserted. Returns a row for each key, as `claim` does, and its
-- token.
with missed as materialized (
    select * from {schema}.claim(%(claims)s::{schema}.claim[], {PROCESSING}::smallint, false)
), begun as (
    insert into {schema}.saga (key, scope_id, handler, state, token, worker, due, attempt, version, source, position,
        message_id, body, headers, delivered, started_at, parent)
    select key, scope, handler, {PROCESSING}, nextval('{schema}.saga_token'), worker, clock_timestamp(), 1, version,
        source, position, message_id, body, headers, delivered, clock_timestamp(), parent
    from unnest(%(key)s::bytea[], %(scope)s::integer[], %(handler)s::text[], %(worker)s::bigint[], %(version)s::text[],
        %(source)s::text[], %(position)s::text[], %(message_id)s::text[], %(body)s::bytea[], %(headers)s::bytea[],
        %(delivered)s::bytea[], %(parent)s::bytea[])
        as w (key, scope, handler, worker, version, source, position, message_id, body, headers, delivered, parent)
    where not exists (select from missed where missed.key = w.key)
    returning key, token
)
select *, null::bigint from missed
union all
select key, null, null, null, null, null, null, null, token from begun

-- name: own_sagas
select key, token from {schema}.saga where worker = %(worker)s and (%(key)s::bytea is null or key = %(key)s)

-- fragment: when_sagas
-- For each handler, in how many seconds its next saga may be taken, negative if it may have been for that long; and the
-- sagas that are ours (handler null), with a request to cancel them (L50). Sagas that are not due within `ahead` are
-- not read: of many sleeping ones, all may belong to another app. A held saga may be taken when its worker's lease is
-- over, so a live worker is read again only when it should have renewed. Owners are read by skipping through the index
-- from one to the next (L32), and so are versions (L60).
select h.handler, extract(epoch from min(next.at) - clock_timestamp())::float8, null::bytea, null::bigint, null::boolean,
    null::text
from unnest(%(handlers)s::text[]) as h (handler)
cross join lateral (
    select first.due + v.grace as at from ready as v
    cross join lateral (
        select s.due from {schema}.saga as s
        where s.worker is null and s.parked is null and s.handler = v.handler and coalesce(s.version, '') = v.name
          and s.due <= (select clock_timestamp() + make_interval(secs => %(ahead)s)) and {of_app}
        order by s.due limit 1
    ) as first
    where v.handler = h.handler
    union all
    select case when w.until <= clock_timestamp() + w.lease then w.until else clock_timestamp() end
    from owner as o left join {schema}.worker as w on w.id = o.worker
    cross join lateral (
        select 1 from {schema}.saga as s where s.worker = o.worker and s.handler = h.handler and {ours} limit 1
    ) as held
    where o.worker <> %(worker)s
) as next
group by h.handler
union all
select null, null, key, token, cancel, null from {schema}.saga where worker = %(worker)s

-- name: look_for_sagas
-- Two statements that write nothing. This one also returns what the queues of this process have (L61).
with recursive {owners}, {versions}, {messages}
{when_sagas}
union all
select null, seconds, null, null, null, name from messages

-- name: look_for_sagas_alone
-- It uses no table of the queue, since another transaction may have locked these.
with recursive {owners}, {versions}
{when_sagas}

-- name: take_sagas
-- Takes up to `limit` sagas of each handler. First our own that are `unheld`, and only under the fence token with which
-- they were seen, since one that was taken again meanwhile has a new token. Then those that are stale, since their
-- worker no longer holds them; then those that are due and have no owner. Each kind is read in the order of an index
-- (L32). SKIP LOCKED skips sagas with an open step, since the owner may still be alive (L2). Handlers of other apps may
-- have the same name (L18).
with recursive {owners}, {versions}, lost as materialized (
    select s.worker from owner as s where s.worker <> %(worker)s and not {held}
), own as materialized (
    select one.* from unnest(%(unheld)s::bytea[], %(tokens)s::bigint[]) as u (key, token)
    cross join lateral (
        select s.key, s.handler, s.worker, s.token, s.attempt, false as lost from {schema}.saga as s
        where s.key = u.key and s.token = u.token and s.worker = %(worker)s and s.handler = any(%(handlers)s::text[]) and {ours}
        for update skip locked
    ) as one limit %(limit)s
), stale as materialized (
    select one.* from unnest(%(handlers)s::text[]) as h (handler)
    cross join lateral (
        select each.* from lost as l
        cross join lateral (
            select s.key, s.handler, s.worker, s.token, s.attempt, true as lost from {schema}.saga as s
            where s.worker = l.worker and s.handler = h.handler and {ours}
            order by s.due limit %(limit)s for update skip locked
        ) as each
        limit %(limit)s - (select count(*) from own where own.handler = h.handler)
    ) as one
), due as materialized (
    select one.* from unnest(%(handlers)s::text[]) as n (handler)
    cross join lateral (
        select each.key, each.handler, each.worker, each.token, each.attempt, false as lost from ready as h
        cross join lateral (
            select s.key, s.handler, s.worker, s.token, s.attempt, s.due from {schema}.saga as s
            where s.worker is null and s.parked is null and s.handler = h.handler
              and coalesce(s.version, '') = h.name and s.due <= h.until and {of_app}
            order by s.due limit %(limit)s for update skip locked
        ) as each
        where h.handler = n.handler
        order by each.due
        limit %(limit)s - (select count(*) from own where own.handler = n.handler)
            - (select count(*) from stale where stale.handler = n.handler)
    ) as one
), candidate as materialized (
    select * from own union all select * from stale union all select * from due
), {taken}

-- name: take_saga
-- Like `take_sagas`, for one saga by its key.
with candidate as materialized (
    select s.key, s.worker, s.token, s.attempt, coalesce(s.worker <> %(worker)s, false) as lost
    from {schema}.saga as s
    where s.key = %(key)s and s.handler = any(%(handlers)s::text[]) and s.parked is null and {ours}
      and case when s.worker is null then s.due <= clock_timestamp()
               when s.worker = %(worker)s then (s.key, s.token) in (
                   select * from unnest(%(unheld)s::bytea[], %(tokens)s::bigint[]))
               else not {held} end
    for update of s skip locked
), {taken}

-- name: await_saga
-- Waits for writes that are still in flight under one of our fence tokens.
select 1 from {schema}.saga where key = %(key)s and worker = %(worker)s for update

-- name: retake_saga
-- A takeover from oneself, after a lost COMMIT. A separate statement after `await_saga`, so that its snapshot shows
-- the writes that were in flight. Attempts are counted as in `take_sagas`.
with taken as (
    update {schema}.saga as s
    set token = greatest(s.token + 1, nextval('{schema}.saga_token')),
        attempt = case when {progressed} then 1 else s.attempt end,
        suspicion = case when {progressed} then 0 else s.suspicion end
    where s.key = %(key)s and s.worker = %(worker)s and s.token = coalesce(%(token)s::bigint, s.token)
    returning s.*
), noted as (
    insert into {schema}.history (key, at, what, owner, token, attempt)
    select key, clock_timestamp(), 'retaken', (select name from {schema}.worker where id = %(worker)s), token, attempt
    from taken
)
select {leased_saga}
from taken as s

-- name: count_saga
-- From now on, until its next finished step, the death of this worker counts as an attempt of the saga (L22).
with counted as (
    update {schema}.saga set suspicion = 3 where key = %(key)s and suspicion <> 3 returning key, worker, token, attempt
)
insert into {schema}.history (key, at, what, owner, token, attempt)
select key, clock_timestamp(), 'alone', (select name from {schema}.worker where id = c.worker), token, attempt
from counted as c

-- name: steps
-- The steps of several sagas, in the order in which they ended, open ones last. A call with an unknown outcome has a
-- fixed place if it was begun with one (L24). Outputs up to `window` bytes of each saga, and those no larger than a
-- row; of the others, only their size (L55). A wait has an end (L40).
select key, name, case when until is null then kind when signal is null then 3 else 4 end, state, has_undo,
    case when state = {INTENT} then not placed else overlapped end, position, attempt,
    case when here then output end, content_type, case when here then 0 else size end, arguments
from (
    select *, size <= 64 or sum(size) over (
        partition by key order by position nulls last, started_at, name) <= %(window)s as here
    from (
        select *, coalesce(octet_length(output), 0) as size from {schema}.step where key = any(%(keys)s::bytea[])
    ) as s
) as s
order by key, position nulls last, started_at, name

-- name: outputs
select name, output, content_type from {schema}.step where key = %(key)s and name = any(%(names)s::text[])

-- name: begin_step
-- See the function (migrations/0005). Like `begin_steps`, but it waits for the saga's row.
select {schema}.begin_step(%(seal)s, %(lock_timeout)s, %(key)s, %(token)s, %(worker)s, %(phase)s::smallint, %(name)s,
    %(kind)s::smallint, %(state)s::smallint, %(has_undo)s, %(arguments)s), {session}, pg_catalog.pg_backend_pid()

-- name: finish_step
-- See the function. Runs in the transaction that began the step, which holds the fence, and seals it too.
select {schema}.finish_step(%(seal)s, %(key)s, %(name)s, %(state)s::smallint, %(overlapped)s, %(token)s, %(output)s,
    %(content_type)s)

-- name: await_step
-- See the function.
select * from {schema}.await_step(%(key)s, %(token)s, %(worker)s, %(phase)s::smallint, %(name)s, %(seconds)s, %(signal)s,
    %(overlapped)s, %(closes)s::text[], %(timed_out)s, %(timed_out_type)s, %(conflict)s, %(conflict_type)s)

-- name: pause_saga
-- See the function.
select {schema}.pause_saga(%(key)s, %(token)s, %(worker)s, %(phase)s::smallint, %(names)s::text[], %(child)s, %(at_most)s)

-- name: start_child
-- See the function.
select * from {schema}.start_child(%(key)s, (%(claims)s::{schema}.claim[])[1], %(queue)s, %(given)s)

-- name: kinship
-- L65. Whether the other saga has not ended and has started this one, directly or through others; each saga counts as
-- having started itself. And whether this one has started the other.
with recursive above (key) as (
    select %(key)s::bytea
    union
    select c.parent
    from above
    cross join lateral (select parent from {schema}.child where key = above.key and not ended offset 0) as c
)
select exists (select from above where key = %(child)s) and exists (select from {schema}.saga where key = %(child)s),
    exists (select from {schema}.child where parent = %(key)s and key = %(child)s)

-- name: stop_child
select {schema}.stop_child(%(key)s, %(token)s, %(worker)s, %(phase)s::smallint, %(child)s, %(scope)s, %(body)s,
    %(content_type)s, %(queue)s, %(given)s)

-- name: send_signal
-- See the function. In the open transaction: from its COMMIT on the saga is due, if it waits for this signal (L42).
select {schema}.send_signal(%(key)s, %(scope)s, %(name)s, %(body)s, %(content_type)s)

-- name: begin_steps
-- Each row is fenced separately, and writes nothing unless its saga's row matches (L2). That row is locked by key in
-- LATERAL … OFFSET 0, an index lookup even if it was planned on empty tables (G5). It is skipped when a rival has
-- locked it: a shared commit waits for no saga. A checkpoint comes before its function, so that a COMMIT inside the
-- function fails at the guard (L3). A step that has ended is not begun again, even by its owner.
insert into {schema}.step (key, name, kind, state, has_undo, placed, token, started_at, arguments)
select w.key, w.name, w.kind, w.state, w.has_undo, w.placed, w.token, clock_timestamp(), w.arguments
from unnest(%(key)s::bytea[], %(token)s::bigint[], %(worker)s::bigint[], %(phase)s::smallint[], %(name)s::text[],
    %(kind)s::smallint[], %(state)s::smallint[], %(has_undo)s::boolean[], %(placed)s::boolean[], %(arguments)s::bytea[])
    as w (key, token, worker, phase, name, kind, state, has_undo, placed, arguments)
cross join lateral (
    select 1 from {schema}.saga where key = w.key and token = w.token and worker = w.worker and state = w.phase
    offset 0 for share skip locked
) as fence
on conflict (key, name) do update
set state = excluded.state, token = excluded.token, attempt = step.attempt + 1,
    placed = case when excluded.state = {INTENT} then excluded.placed else step.placed end,
    arguments = case when excluded.state = {INTENT} then excluded.arguments else step.arguments end,
    undo_at = case when excluded.state = {UNDO_INTENT} then coalesce(step.undo_at, excluded.started_at) end
where (step.state, excluded.state)
    in (({INTENT}, {INTENT}), ({DONE}, {UNDO_INTENT}), ({UNDO_INTENT}, {UNDO_INTENT}))
returning key, name, attempt

-- name: finish_steps
-- Fenced like `begin_steps`. Forward, only steps that have not ended; backward, only steps that are being undone.
-- Whether a step has an undo is decided by the code that finishes it, not by the code that began it (L25).
insert into {schema}.step (key, name, kind, state, has_undo, overlapped, position, token, output, content_type,
    started_at, finished_at, arguments)
select w.key, w.name, w.kind, w.state, w.has_undo, w.overlapped, nextval('{schema}.saga_token'), w.token, w.output,
    w.content_type, clock_timestamp(), clock_timestamp(), w.arguments
from unnest(%(key)s::bytea[], %(token)s::bigint[], %(worker)s::bigint[], %(phase)s::smallint[], %(name)s::text[],
    %(kind)s::smallint[], %(state)s::smallint[], %(has_undo)s::boolean[], %(overlapped)s::boolean[],
    %(output)s::bytea[], %(content_type)s::text[], %(arguments)s::bytea[])
    as w (key, token, worker, phase, name, kind, state, has_undo, overlapped, output, content_type, arguments)
cross join lateral (
    select 1 from {schema}.saga where key = w.key and token = w.token and worker = w.worker and state = w.phase
    offset 0 for share skip locked
) as fence
on conflict (key, name) do update
set state = excluded.state, overlapped = step.overlapped or excluded.overlapped,
    has_undo = excluded.has_undo or (step.has_undo and excluded.state = {UNDONE}),
    position = coalesce(step.position, excluded.position), token = excluded.token,
    output = coalesce(step.output, excluded.output), content_type = coalesce(step.content_type, excluded.content_type),
    finished_at = coalesce(step.finished_at, excluded.finished_at),
    undone_at = case when excluded.state = {UNDONE} then excluded.finished_at end
where case when excluded.state = {UNDONE} then step.state = {UNDO_INTENT} else step.position is null end
returning key, name, position

-- name: fence
-- Held until COMMIT, so a takeover waits for an open step, or skips it. No row: fenced (L2).
select 1 from {schema}.saga
where key = %(key)s and token = %(token)s and worker = %(worker)s and state = %(phase)s for share

-- name: fence_whole
-- Like `fence`, for writes that end the saga or change its phase: waits for all open steps. A request to cancel the
-- saga takes precedence (L50).
select 1, cancel from {schema}.saga
where key = %(key)s and token = %(token)s and worker = %(worker)s and state = %(phase)s for update

-- name: open_intents
-- A separate statement after the row lock: NOT EXISTS in the same one would miss an intent that was committing (L7).
select count(*) from {schema}.step where key = %(key)s and state = {INTENT}

-- name: add_undos
-- L25. So that another worker undoes them too, or reports that its handler cannot.
update {schema}.step set has_undo = true where key = %(key)s and name = any(%(names)s::text[])

-- name: set_undoing
with undoing as (
    update {schema}.saga set state = {UNDOING}, rejection = %(rejection)s, attempt = 1, suspicion = 0, cancel = null
    where key = %(key)s
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
-- Fenced like `begin_steps`, but FOR UPDATE: a saga with an open step is skipped. A saga that is to be cancelled does
-- not complete (L50).
with fenced as materialized (
    select w.key, w.final, w.result, w.content_type, w.status, w.sent
    from unnest(%(key)s::bytea[], %(token)s::bigint[], %(worker)s::bigint[], %(phase)s::smallint[],
        %(final)s::smallint[], %(result)s::bytea[], %(content_type)s::text[], %(status)s::smallint[],
        %(sent)s::bytea[])
        as w (key, token, worker, phase, final, result, content_type, status, sent)
    cross join lateral (
        select 1 from {schema}.saga where key = w.key and token = w.token and worker = w.worker and state = w.phase
          and (cancel is null or w.final = {FAILED})
        offset 0 for update skip locked
    ) as fence
), ended as (
    update {schema}.record as r
    set state = (select final from fenced where fenced.key = r.key), changed_at = clock_timestamp()
    where r.key = any(array(select key from fenced))
), stored as (
    insert into {schema}.result (key, body, content_type, status, headers)
    select key, result, content_type, status, sent from fenced where result is not null
)
delete from {schema}.saga as s where s.key = any(array(select key from fenced))
returning s.key, '', s.attempt

-- name: end_saga
-- For a saga whose row is locked already.
delete from {schema}.saga where key = %(key)s

-- name: release_saga
-- A saga that has run, and ended in whatever way, killed no worker. One that did not run stays as it was. A run that
-- finished a step and then failed was the first attempt since that step (L10); with a new token it is not counted from
-- there again. If there is a request to cancel it that this run did not know, it is due at once (L50). If it is `held`
-- again (D17), and did nothing since it was taken, its history gets no new entries: it shows when it was first held,
-- and when that ended.
with released as (
    update {schema}.saga as s
    set worker = null, error = coalesce(%(error)s, error),
        due = clock_timestamp() + make_interval(secs => case when s.cancel is null or %(heeded)s then %(delay)s else 0 end),
        attempt = case when %(back)s = 0 and {progressed} then 1 else s.attempt - %(back)s end,
        token = case when %(back)s = 0 and {progressed} then greatest(s.token + 1, nextval('{schema}.saga_token'))
                     else s.token end,
        stale = %(stale)s, suspicion = case when %(stale)s then least(suspicion, 2) else 0 end
    where key = %(key)s
    returning key, attempt + %(back)s as attempt
), again as (
    select last.id from {schema}.saga as s
    cross join lateral (
        select id, what, token, lead(what) over (order by id desc) as before, lead(detail) over (order by id desc) as said
        from (select * from {schema}.history where key = s.key order by id desc limit 2) as h
        order by id desc limit 1
    ) as last
    where s.key = %(key)s and %(held)s and last.what = 'taken' and last.token = %(token)s and last.before = 'held'
      and (%(error)s::text is null or last.said = %(error)s) and not {progressed}
), forgotten as (
    delete from {schema}.history where key = %(key)s and id = (select id from again)
)
insert into {schema}.history (key, at, what, owner, token, attempt, detail)
select key, clock_timestamp(), case when %(held)s then 'held' else 'released' end,
    (select name from {schema}.worker where id = %(worker)s), %(token)s, attempt, %(error)s
from released where not exists (select from again)

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
