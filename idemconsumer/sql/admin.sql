-- Queries and decisions of a person. queries.py describes the format: {schema} is the configured schema, {UNDOING}
-- the number stored for that state, {held} a fragment of sagas.sql.

-- fragment: chosen
-- Which dead letters. A parameter is null if it does not restrict them. There are indexes on handler, reason, time and
-- key.
(%(handler)s::text is null or d.handler = %(handler)s) and (%(reason)s::text is null or d.reason = %(reason)s)
  and (%(error)s::text is null or strpos(d.error, %(error)s) > 0)
  and (%(app)s::text is null or split_part(d.scope, '/', 1) = %(app)s)
  and (%(tenant)s::text is null or split_part(d.scope, '/', 2) = %(tenant)s)
  and (%(since)s::float8 is null or d.last_at >= (select clock_timestamp() - make_interval(secs => %(since)s)))
  and (%(until)s::float8 is null or d.last_at < (select clock_timestamp() - make_interval(secs => %(until)s)))
  and (%(low)s::bytea is null or d.key between %(low)s and %(high)s)
  and (%(keys)s::bytea[] is null or d.key = any(%(keys)s)) and (%(ids)s::bigint[] is null or d.id = any(%(ids)s))
  and (%(redriven)s or d.redriven_at is null)

-- name: dead_list
select d.id, d.handler, d.source, d.position, d.reason, d.error, d.attempts, d.arrivals, d.first_at, d.last_at,
    d.redriven_at, d.forwarded_at
from {schema}.dead_letter as d
where (%(before)s::bigint is null or d.id < %(before)s) and {chosen}
order by d.id desc limit %(limit)s

-- name: dead_show
select d.id, d.handler, d.scope, d.source, d.position, d.reason, d.error, d.key, d.body, d.headers, d.attempts, d.arrivals,
    d.first_at, d.last_at, d.delivered, coalesce(d.body_size, length(d.body)) as body_size,
    coalesce(d.body_sha256, sha256(d.body)) as body_sha256, d.redriven_at, d.emptied_at, d.traceback,
    d.forwarded_at
from {schema}.dead_letter as d
where (%(before)s::bigint is null or d.id < %(before)s) and {chosen}
order by d.id desc limit %(limit)s

-- name: dead_groups
-- By cause, and by scope if that is requested. `exception` and `place` are the exception's type and the line that
-- raised it, null for a dead letter without an exception; `newest` is the id of the newest dead letter. For an
-- exception, the error's text begins with the type and ends with the place (`describe` in engine/blame.py). The
-- functions `error_type` and `error_place` give the same, but take four times as long for a million dead letters: they
-- are not inlined.
select d.handler, d.reason, case when e.place is not null then
        split_part(split_part(split_part(split_part(d.error, E'\n', 1), ':', 1), ' ', 1), '(', 1) end as exception, e.place,
    count(*) as letters, sum(d.arrivals)::bigint as arrivals, min(d.first_at) as first_at, max(d.last_at) as last_at,
    max(d.id) as newest, case when %(by_tenant)s then d.scope end as scope
from {schema}.dead_letter as d
cross join lateral (
    select case when right(d.error, 1) = ')' then left(right(d.error, strpos(reverse(d.error), '(') - 1), -1) end
) as t (tail)
cross join lateral (select case when t.tail ~ '^\S+:\d+ ' then t.tail end) as e (place)
where {chosen}
group by 1, 2, 3, 4, 10
order by letters desc, d.handler, d.reason, exception, place, scope

-- name: dead_last
-- A run ends with this dead letter.
select max(id) as id from {schema}.dead_letter

-- name: dead_to_redrive
-- The next ones of a run, which redrives a dead letter only once, however often it fails. Without bodies: those stay
-- here.
select d.id, d.handler, d.scope, d.source, d.position, d.reason, d.error, d.key, d.headers, d.delivered,
    case when d.emptied_at is null then length(d.body) end as kept, coalesce(d.body_size, length(d.body)) as body_size,
    (select s.parked is not null from {schema}.saga as s where s.key = d.key) as parked
from {schema}.dead_letter as d
where d.id > %(after)s and d.id <= %(last)s and {chosen}
  and not exists (select from {schema}.redrive as t where t.letter = d.id and t.run = %(run)s)
order by d.id limit %(limit)s

-- name: share_run
-- O32: redrives are entered under this shared lock; a run is cancelled under the exclusive one.
select pg_advisory_xact_lock_shared(4711, hashtext(%(run)s))

-- name: run_cancelled
select exists (select from {schema}.redrive where run = %(run)s and letter = 0) as cancelled

-- name: lock_run
select pg_advisory_xact_lock(4711, hashtext(%(run)s))

-- name: cancel_run
insert into {schema}.redrive (letter, run, by, at, queued, outcome, ended_at)
select 0, %(run)s, %(by)s, clock_timestamp(), 0, 'cancelled', clock_timestamp()
where exists (select from {schema}.redrive where run = %(run)s and outcome is distinct from 'released')
returning id

-- name: tickets_of_run
-- Without those of sagas that were resumed.
select id from {schema}.redrive
where run = %(run)s and id > %(after)s and outcome is null and queued > 0 order by id limit %(limit)s

-- name: cancel_ticket
select {schema}.cancel_ticket(%(ticket)s) as cancelled

-- fragment: came_of
-- The outcome of a redrive.
coalesce(t.outcome, case when t.key is null and not exists (select from {schema}.queue where id = t.queued)
    then 'settled' else 'waiting' end)

-- name: redrive_runs
-- The newest first: how many dead letters each has redriven, and the outcomes of these (as in `dead_redrives`, or
-- `cancelled`). A run that is `cancelled` redrives no more; the release of a key belongs to no run.
select r.run, min(r.by) as by, min(r.at) as began_at, sum(r.letters)::bigint as letters, bool_or(r.cancelled) as cancelled,
    coalesce(jsonb_object_agg(r.outcome, r.letters) filter (where r.letters > 0), '{{}}') as outcomes
from (
    select t.run, {came_of} as outcome, min(t.by) as by, min(t.at) as at, count(*) filter (where t.letter <> 0) as letters,
        bool_or(t.letter = 0) as cancelled
    from {schema}.redrive as t where t.outcome is distinct from 'released' group by 1, 2
) as r
group by 1
order by 3 desc limit %(limit)s

-- name: redrive_letter
select {schema}.redrive_letter(%(letter)s, %(queue)s, %(headers)s, %(run)s, %(by)s)

-- name: redrive_saga
select {schema}.redrive_saga(%(letter)s, %(run)s, %(by)s)

-- name: dead_redrives
-- The redrives of one dead letter, or of its key under other dead letters.
select t.id, t.letter, t.run, t.by, t.at, t.ended_at, {came_of} as outcome
from {schema}.redrive as t
where t.letter = %(letter)s or t.key = %(key)s
order by t.id

-- name: discard_letters
-- Without those of sagas that wait for a person.
delete from {schema}.dead_letter where id in (
    select d.id from {schema}.dead_letter as d
    where d.id > %(after)s and d.id <= %(last)s and {chosen}
      and not exists (select from {schema}.saga as s where s.key = d.key)
    order by d.id limit %(limit)s for update skip locked
)
returning id

-- name: count_chosen
select count(*) as letters,
    count(*) filter (where exists (select from {schema}.saga as s where s.key = d.key)) as of_sagas
from {schema}.dead_letter as d where {chosen}

-- name: delayed
-- For queues in Postgres, how many messages are not due yet, and when the first one is. Messages of a handler that wait
-- for their next attempt have a queue of their own, `~~app/handler`.
select name, count(*) as messages, min(due_at) as due_at from {schema}.delayed group by name order by name

-- name: unforwarded
-- Dead letters of an app that wait to be forwarded (O19).
select d.handler, count(*) as letters, extract(epoch from clock_timestamp() - min(o.created_at))::float8 as seconds
from {schema}.outbox as o join {schema}.dead_letter as d on d.id = o.letter
where starts_with(d.scope, %(scopes)s) group by d.handler order by d.handler

-- name: saga_list
-- Sagas that run, wait for their next attempt, or wait for a person (`state` dead; `parked`: the reason). `owner` is
-- the worker that holds it, null between attempts; `stale`, as in take_sagas: its lease has expired. `attempt` counts
-- takeovers since the last finished step; `token`, the fence token, increases with each takeover. `cancel`: it is to be
-- cancelled, and whether its finished steps are to be undone then; null if no cancellation was requested. `waits`: its
-- sleeps and waits, such as "signal approved"; then `due` is the end of the first one.
select encode(s.key, 'hex') as key, c.name as scope, s.handler, line.state, s.parked, w.name as owner, s.token,
    s.attempt, s.due, s.worker is not null and not {held} as stale,
    (select name from {schema}.step where key = s.key and position is not null order by position desc limit 1)
        as recovery_point,
    s.version, s.error, s.source, s.position, s.message_id, s.started_at, s.cancel,
    to_jsonb(array(
        select case when signal is null then 'sleep ' || name
                    when starts_with(signal, 'child:') then 'child ' || substr(signal, 7, 12)
                    else 'signal ' || signal end from {schema}.step
        where key = s.key and until is not null and position is null and s.state <> {UNDOING} order by started_at)
        || array(  -- an undo waits only for the end of a child (L49)
        select 'child ' || substr(signal, 7, 12) from unnest(s.signals) as signal where s.state = {UNDOING})) as waits
from {schema}.saga as s
join {schema}.scope as c on c.id = s.scope_id
left join {schema}.worker as w on w.id = s.worker
cross join lateral (
    select case when s.parked is not null then 'dead' when s.state = {UNDOING} then 'undoing' else 'processing' end
) as line (state)
where (%(handler)s::text is null or s.handler = %(handler)s)
  and (%(key)s::bytea is null or s.key = %(key)s)
  and (%(state)s::text is null or line.state = %(state)s)
  and (not %(stale)s or s.worker is not null and not {held})
order by s.started_at desc limit %(limit)s

-- name: saga_histories
-- Sagas that have not ended, for `sagas export`. `since`: seconds ago.
select s.key, c.name as scope, s.handler, s.version, s.state, s.parked, s.cancel, s.rejection, s.started_at, s.source,
    s.position, s.message_id, s.body, s.headers, s.delivered
from {schema}.saga as s join {schema}.scope as c on c.id = s.scope_id
where (%(handler)s::text is null or s.handler = %(handler)s)
  and (%(since)s::float8 is null or s.started_at >= clock_timestamp() - make_interval(secs => %(since)s))
  and (%(state)s::text is null or %(state)s = case
      when s.parked is not null then 'dead' when s.state = {UNDOING} then 'undoing' else 'processing' end)
order by s.started_at desc, s.key limit %(limit)s

-- name: waiting_sagas
-- L31. Sagas that are not parked, by app, handler and version. The app's name is quoted, as in a scope's.
select coalesce(s.app, split_part(c.name, '/', 1)) as app, s.handler, s.version, count(*) as sagas
from {schema}.saga as s join {schema}.scope as c on c.id = s.scope_id
where s.parked is null
group by 1, 2, 3
order by 1, 2, 3

-- name: unbegun_children
-- L31. Child sagas whose messages no worker has taken; app and handler as in the queue's name.
select q.app, q.handler, count(*) as sagas
from (
    select split_part(substr(name, 2), '/', 1) as app, substr(name, position('/' in name) + 1) as handler, message_id,
        headers
    from {schema}.queue where starts_with(name, '~') and not starts_with(name, '~~') and message_id is not null
) as q
where exists (
    select from {schema}.child as c
    where not c.ended and c.key = {schema}.saga_key(
        q.app, q.handler, q.message_id, convert_from(q.headers, 'UTF8')::json ->> 'idemconsumer-tenant')
)
group by 1, 2
order by 1, 2

-- name: live_workers
select runs from {schema}.worker where until >= clock_timestamp()

-- name: move_sagas
-- L31. Without those that a live worker holds. A saga that was started from code has a queue of its handler as its
-- source.
with moved as (
    update {schema}.saga as s
    set app = %(to_app)s, handler = %(to_handler)s, token = greatest(s.token + 1, nextval('{schema}.saga_token')),
        worker = null, stale = s.stale or s.worker is not null,
        source = case when s.source = %(from_source)s then %(to_source)s else s.source end
    where s.handler = %(from_handler)s and not {held}
      and coalesce(s.app, split_part((select name from {schema}.scope where id = s.scope_id), '/', 1)) = %(from_app)s
    returning s.key
), noted as (
    insert into {schema}.history (key, at, what, detail)
    select key, clock_timestamp(), 'moved', %(detail)s::text from moved
)
select (select count(*) from moved) as moved,
    (select count(*) from {schema}.saga as s where s.handler = %(from_handler)s and {held}
     and coalesce(s.app, split_part((select name from {schema}.scope where id = s.scope_id), '/', 1)) = %(from_app)s)
        as held

-- name: moveable_sagas
-- The handlers that have sagas which `move_sagas` could move. The app's name is quoted.
select distinct coalesce(s.app, split_part(c.name, '/', 1)) as app, s.handler
from {schema}.saga as s join {schema}.scope as c on c.id = s.scope_id
order by 1, 2

-- name: saga_keys
-- Finds records by a prefix of their key, as a range of the primary key.
select r.key from {schema}.record as r where r.key between %(low)s and %(high)s order by r.key limit %(limit)s

-- name: scopes
select name from {schema}.scope

-- name: saga_record
select c.name as scope, r.state, r.changed_at, e.body as result
from {schema}.record as r
join {schema}.scope as c on c.id = r.scope_id
left join {schema}.result as e on e.key = r.key
where r.key = %(key)s and {counts}

-- name: saga_parent
-- L80. The saga whose start began this one.
select encode(parent, 'hex') as parent from {schema}.saga where key = %(key)s and parent is not null
union all
select encode(parent, 'hex') from {schema}.child where key = %(key)s and began and ended

-- name: saga_signals
-- The signals that no wait has taken. `awaited`: an open wait is for this signal.
select g.name, count(*) as signals, min(g.sent_at) as first_at, exists (
        select from {schema}.step as t where t.key = %(key)s and t.signal = g.name and t.position is null) as awaited
from {schema}.signal as g where g.key = %(key)s
group by g.name order by g.name

-- name: unawaited_signals
-- L81. Signals to sagas that have not ended and do not wait for that name now. `begun`: how many of these sagas have
-- begun.
select c.name as scope, g.name, count(*) as signals, min(g.sent_at) as first_at, count(r.key) as begun
from {schema}.signal as g
join {schema}.scope as c on c.id = g.scope_id
left join {schema}.record as r on r.key = g.key
where (r.key is null or r.state not in ({COMPLETED}, {FAILED}))
  and not exists (
      select from {schema}.step as t where t.key = g.key and t.signal = g.name and t.position is null)
group by c.name, g.name order by c.name, g.name

-- name: awaited_names
-- The signals that sagas of this handler wait for, or have waited for, taken from the youngest thousand of them.
select distinct t.signal as name from (
    select s.key from {schema}.saga as s where s.handler = %(handler)s order by s.due desc limit 1000
) as s
join {schema}.step as t on t.key = s.key
where t.signal is not null and not starts_with(t.signal, 'child:')
order by 1

-- name: saga_steps
select name, case when until is null then kind when signal is null then 3 else 4 end as kind, state, has_undo, overlapped,
    token, attempt, output, started_at, finished_at, undo_at, undone_at, until, signal
from {schema}.step where key = %(key)s order by started_at, position nulls last

-- name: saga_history
select at, what, owner, token, attempt, detail from {schema}.history where key = %(key)s order by id

-- name: lock_saga
-- Waits for open steps; from then on no worker can take the saga over (L19).
select 1 from {schema}.saga where key = %(key)s for update

-- name: locked_saga
-- A separate statement after the row lock, so that its snapshot shows a takeover or a renewed lease of the time in
-- which the lock was awaited.
select s.state, s.rejection, w.name as owner, {held} as held, s.parked, s.cancel
from {schema}.saga as s left join {schema}.worker as w on w.id = s.worker
where s.key = %(key)s

-- name: resume_saga
-- The saga has no owner, is due now, and has all its attempts again. The fence token is new, since the last owner may
-- be frozen rather than dead.
update {schema}.saga
set token = greatest(token + 1, nextval('{schema}.saga_token')), parked = null, worker = null, stale = false,
    due = clock_timestamp(), attempt = 0, state = %(state)s, version = coalesce(%(version)s, version),
    rejection = coalesce(rejection, %(rejection)s), unable = null
where key = %(key)s

-- name: open_calls
-- L52. Calls, and undos of calls, with an unknown outcome; and a call whose outcome a person has given, if the handler
-- could not continue with that.
select name, state, attempt from {schema}.step where key = %(key)s and state in ({INTENT}, {UNDO_INTENT})
union all
select s.name, {INTENT}, s.attempt from {schema}.step as s join {schema}.saga as g using (key)
where s.key = %(key)s and s.state = {DONE} and g.parked = 'saga_changed'
  and (select detail from {schema}.history
       where key = s.key and what = 'decided' and starts_with(detail, 'step ' || s.name || ': ')
       order by id desc limit 1) = 'step ' || s.name || ': done'
  and not exists (select from {schema}.step as n where n.key = s.key and (n.position is null or n.position > s.position))
order by name

-- name: decide_done
update {schema}.step
set state = {DONE}, position = nextval('{schema}.saga_token'), finished_at = clock_timestamp(), output = %(output)s,
    content_type = %(content_type)s
where key = %(key)s and name = %(name)s and state in ({INTENT}, {DONE})

-- name: decide_not_done
-- As if it had not been begun: it is called again, and its reconcile is not asked.
delete from {schema}.step where key = %(key)s and name = %(name)s and state in ({INTENT}, {DONE})

-- name: decide_undone
update {schema}.step set state = {UNDONE}, undone_at = clock_timestamp()
where key = %(key)s and name = %(name)s and state = {UNDO_INTENT}

-- name: decide_not_undone
update {schema}.step set state = {DONE}, undo_at = null
where key = %(key)s and name = %(name)s and state = {UNDO_INTENT}

-- name: request_cancel
-- L50: a request, which the saga's worker, if it has one, will notice.
update {schema}.saga set cancel = %(undo)s where key = %(key)s

-- name: forget_dead
-- A person has decided, so the saga is no longer a dead letter.
delete from {schema}.dead_letter where key = %(key)s

-- name: known_keys
-- The first keys that have any rows, in a range of the indexes; no more rows are read than these.
(select key from {schema}.record where key between %(low)s and %(high)s order by key limit %(limit)s)
union (select key from {schema}.attempt where key between %(low)s and %(high)s order by key limit %(limit)s)
union (select distinct key from {schema}.dead_letter where key between %(low)s and %(high)s order by key limit %(limit)s)
order by key limit %(limit)s

-- name: key_list
-- In the order of the keys, since records have no index by time.
select encode(r.key, 'hex') as key, c.name as scope, r.state, r.changed_at
from {schema}.record as r join {schema}.scope as c on c.id = r.scope_id
where (%(after)s::bytea is null or r.key > %(after)s) and (%(scopes)s::integer[] is null or r.scope_id = any(%(scopes)s))
  and (%(state)s::smallint is null or r.state = %(state)s)
order by r.key limit %(limit)s

-- name: scope_ids
select id, name from {schema}.scope

-- name: key_record
select c.name as scope, r.state, r.changed_at, r.fingerprint is not null as compared, e.body as result,
    coalesce(r.expires_at, r.changed_at + c.retain) as until,
    coalesce(r.expires_at, r.changed_at + c.retain) < clock_timestamp() as over,
    s.started_at as request_since, s.again as request_again, not {held} as request_lost, w.name as request_owner,
    a.created_at as accepted_at, a.via, a.token is not null as awaited
from {schema}.record as r
join {schema}.scope as c on c.id = r.scope_id
left join {schema}.accepted as a on a.key = r.key
left join {schema}.result as e on e.key = r.key
left join {schema}.request as s on s.key = r.key
left join {schema}.worker as w on w.id = s.worker
where r.key = %(key)s and {counts}

-- name: key_attempts
select c.name as scope, a.count, a.error, a.changed_at
from {schema}.attempt as a join {schema}.scope as c on c.id = a.scope_id where a.key = %(key)s

-- name: key_stored
-- When the message that a PENDING record waits for will run; null once a worker may take it. Found by the key in its
-- headers.
select null::timestamptz as due_at from {schema}.queue
where name = %(name)s and position(%(digits)s::bytea in headers) > 0
union all
select due_at from {schema}.delayed where name = %(name)s and position(%(digits)s::bytea in headers) > 0
limit 1

-- name: key_letters
select id, handler, source, position, reason, error, attempts, arrivals, first_at, last_at, redriven_at,
    forwarded_at
from {schema}.dead_letter where key = %(key)s order by id

-- name: lock_key
-- The lock of a claim (J1), but waits for it.
select pg_advisory_xact_lock(('x' || encode(substring(%(key)s::bytea for 8), 'hex'))::bit(64)::bigint)

-- name: lock_request
-- From now on no process takes it over; a takeover does not need the key's lock (H24).
select 1 from {schema}.request where key = %(key)s for update

-- name: decided_key
-- In a statement of its own, after the locks.
select r.state, exists (select from {schema}.saga where key = %(key)s) as runs,
    exists (select from {schema}.step where key = %(key)s) as stepped,
    (select {held} from {schema}.request as s where s.key = %(key)s) as requested,
    exists (select from {schema}.accepted where key = %(key)s and token is not null) as awaited
from (select %(key)s::bytea as key) as k left join {schema}.record as r on r.key = k.key

-- name: forget_key
-- Fingerprints too: if a payload can be guessed, its fingerprint confirms the guess.
with results as (delete from {schema}.result where key = %(key)s),
    attempts as (delete from {schema}.attempt where key = %(key)s),
    steps as (delete from {schema}.step where key = %(key)s),
    histories as (delete from {schema}.history where key = %(key)s),
    signals as (delete from {schema}.signal where key = %(key)s),
    children as (update {schema}.child set body = null, content_type = null, fingerprint = null, canonical = null
                 where key = %(key)s),
    started as (delete from {schema}.child where parent = %(key)s),
    traces as (delete from {schema}.redrive where key = %(key)s),
    records as (update {schema}.record set fingerprint = null, canonical = null where key = %(key)s),
    acceptances as (update {schema}.accepted set body = null, headers = null where key = %(key)s),
    letters as (delete from {schema}.dead_letter where key = %(key)s returning id)
select count(*) from letters

-- name: key_deliveries
-- The newest deliveries: the outcome of each and its time, where it came from, which process had it, and for how many
-- seconds. There is no index on keys: it would cost each message as much as the rest of its row.
select d.at - make_interval(secs => coalesce(d.ended[k.i], d.ended[1]) / 1000.0) as at,
    coalesce(w.outcomes[k.i], w.outcomes[1]) as outcome,
    coalesce(w.sources[k.i], w.sources[1]) || ' ' || coalesce(w.positions[k.i], '') as place, d.worker,
    coalesce(d.attempts[k.i], d.attempts[1]) as attempt,
    (coalesce(d.arrived[k.i], d.arrived[1]) - coalesce(d.ended[k.i], d.ended[1])) / 1000.0::float8 as seconds
from {schema}.delivery_log as d
cross join lateral (
    select string_to_array(d.sources, e'\n') as sources, string_to_array(d.positions, e'\n') as positions,
        string_to_array(d.outcomes, e'\n') as outcomes
) as w
cross join unnest(d.keys) with ordinality as k (key, i)
where %(first)s = any(d.keys) and k.key = %(first)s
order by at desc limit %(limit)s

-- name: forget_deliveries
-- The position too, which may be an id that its producer has chosen. What is left shows only that there was a delivery.
update {schema}.delivery_log as d
set keys = array_replace(d.keys, %(first)s::bigint, null), positions = array_to_string(array(
    select case when p.key = %(first)s then '' else p.place end
    from unnest(d.keys, string_to_array(d.positions, e'\n')) with ordinality as p (key, place, i) order by p.i), e'\n')
where %(first)s = any(d.keys)

-- name: delete_record
with requests as (delete from {schema}.request where key = %(key)s),
    acceptances as (delete from {schema}.accepted where key = %(key)s)
delete from {schema}.record where key = %(key)s

-- name: release_key
-- Its dead letters are closed, with the name of the person.
with records as (delete from {schema}.record where key = %(key)s),
    requests as (delete from {schema}.request where key = %(key)s),
    acceptances as (delete from {schema}.accepted where key = %(key)s),
    results as (delete from {schema}.result where key = %(key)s),
    attempts as (delete from {schema}.attempt where key = %(key)s),
    letters as (
        update {schema}.dead_letter set redriven_at = clock_timestamp() where key = %(key)s and redriven_at is null
        returning id
    ), traces as (
        insert into {schema}.redrive (letter, key, run, by, at, queued, outcome, ended_at)
        select id, %(key)s, 'release', %(by)s, clock_timestamp(), 0, 'released', clock_timestamp() from letters
    )
select count(*) from letters
