-- What a person can query and decide. queries.py describes the format: {schema} is the configured schema, {UNDOING}
-- the number stored for that state, {held} a fragment of sagas.sql.

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

-- name: saga_list
-- Sagas that run, wait for their next attempt, or wait for a person (dead). Stale means the same as in take_sagas.
select encode(s.key, 'hex') as key, c.name as scope, s.handler, line.state, s.parked, w.name as owner, s.token,
    s.attempt, s.due, s.worker is not null and not {held} as stale,
    (select name from {schema}.step where key = s.key and position is not null order by position desc limit 1)
        as recovery_point,
    s.version, s.error, s.source, s.position, s.message_id, s.started_at
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
where r.key = %(key)s

-- name: saga_steps
select name, kind, state, has_undo, overlapped, token, attempt, output, started_at, finished_at, undo_at, undone_at
from {schema}.step where key = %(key)s order by started_at, position nulls last

-- name: saga_history
select at, what, owner, token, attempt, detail from {schema}.history where key = %(key)s order by id

-- name: lock_saga
-- Waits for open steps; from then on no worker can take the saga over (L19).
select 1 from {schema}.saga where key = %(key)s for update

-- name: locked_saga
-- A separate statement after the row lock, so that its snapshot shows who took the saga, or renewed a lease, while the
-- lock was awaited.
select s.state, s.rejection, w.name as owner, {held} as held
from {schema}.saga as s left join {schema}.worker as w on w.id = s.worker
where s.key = %(key)s

-- name: resume_saga
-- The saga has no owner, is due now, and has all its attempts again. The fence token is new, since the last owner may
-- be frozen rather than dead.
update {schema}.saga
set token = greatest(token + 1, nextval('{schema}.saga_token')), parked = null, worker = null, stale = false,
    due = clock_timestamp(), attempt = 0, state = %(state)s, version = coalesce(%(version)s, version),
    rejection = coalesce(rejection, %(rejection)s)
where key = %(key)s

-- name: forget_dead
-- A person has decided, so the saga is no longer put aside.
delete from {schema}.dead_letter where key = %(key)s
