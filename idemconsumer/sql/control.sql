-- The rows of workers, and what people request of them. queries.py describes the format: {schema} is the configured
-- schema.

-- fragment: decided
-- O14. What people have decided about the handlers of an app.
(select coalesce(json_agg(json_build_object('app', c.app, 'handler', c.handler, 'at', c.at, 'by', c.by,
    'reason', c.reason)), '[]')::text from {schema}.control as c where c.app = %(app)s)

-- fragment: app_of_saga
coalesce(s.app, split_part((select name from {schema}.scope where id = s.scope_id), '/', 1))

-- fragment: saga_read
select {app_of_saga} as app, s.state, s.due, s.started_at from {schema}.saga as s
where (%(app)s::text is null or {app_of_saga} = %(app)s)

-- name: register_process
-- One instant for both: two calls of the clock differ, and the worker would seem to have been seen again.
insert into {schema}.process (app, host, pid, place, version, state, handlers, started_at, seen_at)
values (%(app)s, %(host)s, %(pid)s, %(place)s, %(version)s, %(state)s, %(handlers)s::jsonb, statement_timestamp(),
    statement_timestamp())
returning id, false, {decided}

-- name: refresh_process
-- O13. A process that was away for long gets a new row, under a new number: a database that was restored from a backup
-- may give the old number to another worker (R43).
with seen as (
    update {schema}.process set seen_at = clock_timestamp(), state = %(state)s, handlers = %(handlers)s::jsonb
    where id = %(id)s returning id, drain_at
), again as (
    insert into {schema}.process (app, host, pid, place, version, state, handlers, started_at, seen_at)
    select %(app)s, %(host)s, %(pid)s, %(place)s, %(version)s, %(state)s, %(handlers)s::jsonb, statement_timestamp(),
        statement_timestamp()
    where not exists (select from seen)
    returning id
)
select coalesce((select id from seen), (select id from again)), exists (select from seen where drain_at is not null), {decided}

-- name: forget_process
delete from {schema}.process where id = %(id)s

-- name: prune_processes
-- O13. Processes that ended without deleting their row. For an hour a person can still query them.
delete from {schema}.process where seen_at < clock_timestamp() - interval '1 hour'

-- name: processes
-- `lost`: it has missed three updates.
select p.id, p.app, p.host, p.pid, p.place, p.version, p.handlers::text as handlers, p.started_at, p.seen_at, p.drain_at,
    case when p.seen_at < clock_timestamp() - make_interval(secs => %(lost)s) then 'lost'
         when p.drain_at is not null then 'draining' else p.state end as state,
    extract(epoch from clock_timestamp() - p.seen_at)::float8 as unseen
from {schema}.process as p
where %(app)s::text is null or p.app = %(app)s
order by p.app, p.host, p.place, p.id

-- name: unrecorded_workers
-- L28. Leases of processes without a row: of a program that runs sagas itself, or of a worker that has just begun. A
-- lease that runs no handlers is for requests, and is neither (H22).
select w.name, w.runs::text as runs from {schema}.worker as w
where w.until >= clock_timestamp() and w.runs <> '[]'
  and not exists (select from {schema}.process as p where p.host || ':' || p.pid = w.name)
order by w.id

-- name: paused_handlers
-- With the person, the time and the reason.
select app, handler, at, by, reason from {schema}.control
where %(app)s::text is null or app = %(app)s order by app, handler

-- name: pause_handler
-- O14, O16. A worker that is notified reads this row, which is in the same commit.
with done as (
    insert into {schema}.control (app, handler, at, by, reason)
    values (%(app)s, %(handler)s, clock_timestamp(), %(by)s, %(reason)s)
    on conflict (app, handler) do nothing returning app, handler
), noted as (
    insert into {schema}.audit (at, by, role, what, target, reason)
    select clock_timestamp(), %(by)s, session_user, 'pause', app || '/' || handler, %(reason)s from done
)
select count(*) as changed, pg_notify('idemconsumer_queue', 'control:')::text as told from done

-- name: resume_handler
with done as (
    delete from {schema}.control where app = %(app)s and handler = %(handler)s returning app, handler
), noted as (
    insert into {schema}.audit (at, by, role, what, target, reason)
    select clock_timestamp(), %(by)s, session_user, 'resume', app || '/' || handler, %(reason)s from done
)
select count(*) as changed, pg_notify('idemconsumer_queue', 'control:')::text as told from done

-- name: drain_process
with done as (
    update {schema}.process set drain_at = clock_timestamp() where id = %(id)s and drain_at is null
    returning id, app, host, pid
), noted as (
    insert into {schema}.audit (at, by, role, what, target, reason)
    select clock_timestamp(), %(by)s, session_user, 'drain', format('worker %%s (%%s, %%s:%%s)', id, app, host, pid),
        %(reason)s from done
)
select count(*) as changed, pg_notify('idemconsumer_queue', 'control:')::text as told from done

-- name: note_decision
-- O16: in the transaction of the decision.
insert into {schema}.audit (at, by, role, what, target)
values (clock_timestamp(), %(by)s, session_user, %(what)s, %(target)s) returning id

-- name: note_progress
update {schema}.audit set target = %(target)s where id = %(id)s returning id

-- name: audit
-- `by`: the name that the person gave; `role`: the role in the database.
select id, at, by, role, what, target, reason from {schema}.audit order by id desc limit %(limit)s

-- name: lock_waits
-- O34. Which of these sessions have waited for a lock for so long, and which session holds it: of several holders one
-- that does not wait itself, and began first. Not for the gate (G3): groups wait for that by design. Only members of
-- pg_read_all_stats see what another role runs.
select w.pid, h.pid, h.program, h.role, h.state, h.statement, h.since
from (
    select distinct l.pid from unnest(%(pids)s::int[]) as p (pid)
    join pg_locks as l on l.pid = p.pid and not l.granted and l.waitstart < clock_timestamp() - make_interval(secs => %(seconds)s)
    where l.locktype <> 'advisory' or l.classid <> 1768186979
) as w
cross join lateral (
    select b.pid, coalesce(nullif(a.application_name, ''), a.backend_type) as program, a.usename::text as role, a.state,
        case when a.query <> '<insufficient privilege>' then left(a.query, 1000) end as statement,
        to_char(a.xact_start, 'YYYY-MM-DD HH24:MI:SS') as since
    from unnest(pg_blocking_pids(w.pid)) as b (pid) left join pg_stat_activity as a on a.pid = b.pid
    order by cardinality(pg_blocking_pids(b.pid)), a.xact_start limit 1
) as h

-- name: status_time
select clock_timestamp() as at

-- name: status_queues
-- `most`: only the first `most` rows of each queue are read; `more`: there are more. `oldest`: seconds since the first
-- message that waits was published, or released; `overdue`: since the first one that is due should have been moved to
-- its queue. `waiting` messages could be taken now, workers have `in_hand`, and `delayed` ones are not due yet, the
-- first at `next`.
select w.name, r.waiting, r.in_hand, r.oldest, l.delayed, l.next, l.overdue, r.more or l.delayed > %(most)s as more
from (select distinct name from {schema}.line where line in ('queue', 'delayed')) as w
cross join lateral (
    select count(*) filter (where q.visible) as waiting, count(*) filter (where not q.visible) as in_hand,
        extract(epoch from clock_timestamp() - min(q.visible_at) filter (where q.visible))::float8 as oldest,
        count(*) > %(most)s as more
    from (select visible_at, visible_at <= clock_timestamp() as visible from {schema}.queue
          where name = w.name and coalesce(moved, id) >= {queue_low} order by coalesce(moved, id) limit %(most)s + 1) as q
) as r
cross join lateral (
    select count(*) as delayed, min(d.due_at) as next,
        greatest(0, extract(epoch from clock_timestamp() - min(d.due_at)))::float8 as overdue
    from (select due_at from {schema}.delayed
          where name = w.name and due_at >= {delayed_low} order by due_at limit %(most)s + 1) as d
) as l
order by w.name

-- name: status_sagas
-- O30: up to `most` sagas are read of each handler, of each version of those that wait, and of each kind. Only the
-- requested app's are read; if no app is given, apps with a handler of the same name share that limit. The app's name
-- is quoted, as in a scope's. `due`: a worker could take it now; `overdue`: for so many seconds.
with recursive handlers (name) as (
    (select s.handler from {schema}.saga as s order by s.handler limit 1)
    union all
    select (select s.handler from {schema}.saga as s where s.handler > h.name order by s.handler limit 1)
    from handlers as h where h.name is not null
), free (handler, version) as (
    (select s.handler, coalesce(s.version, '') from {schema}.saga as s where s.worker is null and s.parked is null
     order by s.handler, coalesce(s.version, '') limit 1)
    union all
    select next.* from free as f cross join lateral (
        select s.handler, coalesce(s.version, '') from {schema}.saga as s where s.worker is null and s.parked is null
          and (s.handler, coalesce(s.version, '')) > (f.handler, f.version)
        order by s.handler, coalesce(s.version, '') limit 1) as next
), read (kind, handler, app, state, due, started_at, among) as (
    select 'waiting', f.handler, s.*, count(*) over (partition by f) from free as f cross join lateral (
        {saga_read} and s.worker is null and s.parked is null and s.handler = f.handler
          and coalesce(s.version, '') = f.version and s.due > (select clock_timestamp())
        order by s.due limit %(most)s + 1) as s
    union all
    select 'due', f.handler, s.*, count(*) over (partition by f) from free as f cross join lateral (
        {saga_read} and s.worker is null and s.parked is null and s.handler = f.handler
          and coalesce(s.version, '') = f.version and s.due <= (select clock_timestamp())
        order by s.due limit %(most)s + 1) as s
    union all
    select 'running', h.name, s.*, count(*) over (partition by h) from handlers as h cross join lateral (
        {saga_read} and s.worker is not null and s.handler = h.name limit %(most)s + 1) as s
    union all
    select 'review', h.name, s.*, count(*) over (partition by h) from handlers as h cross join lateral (
        {saga_read} and s.parked is not null and s.handler = h.name limit %(most)s + 1) as s
)
select r.app, r.handler, count(*) filter (where r.kind = 'running') as running,
    count(*) filter (where r.kind = 'waiting') as waiting, count(*) filter (where r.kind = 'due') as due,
    count(*) filter (where r.kind <> 'review' and r.state = {UNDOING}) as undoing,
    count(*) filter (where r.kind = 'review') as review, min(r.started_at) as oldest,
    extract(epoch from clock_timestamp() - min(r.due) filter (where r.kind = 'due'))::float8 as overdue,
    max(max(r.among)) over (partition by r.handler) > %(most)s as more
from read as r
group by 1, 2
order by 1, 2

-- name: status_letters
-- O30: up to `most` dead letters are counted of each reason, and only those of the requested app that wait for a
-- person.
with recursive open (scope, reason) as (
    (select d.scope, d.reason from {schema}.dead_letter as d where d.redriven_at is null
     order by d.scope, d.reason limit 1)
    union all
    select next.* from open as o cross join lateral (
        select d.scope, d.reason from {schema}.dead_letter as d
        where d.redriven_at is null and (d.scope, d.reason) > (o.scope, o.reason)
        order by d.scope, d.reason limit 1) as next
)
select r.reason, counted.letters, r.newest, counted.letters > %(most)s as more
from (
    select o.reason, array_agg(o.scope) as scopes, max(newest.last_at) as newest
    from open as o cross join lateral (
        select d.last_at from {schema}.dead_letter as d
        where d.redriven_at is null and d.scope = o.scope and d.reason = o.reason order by d.last_at desc limit 1) as newest
    where %(scopes)s::text is null or starts_with(o.scope, %(scopes)s)
    group by 1
) as r
cross join lateral (
    select count(*) as letters from (
        select from unnest(r.scopes) as s (name) cross join lateral (
            select from {schema}.dead_letter as d
            where d.redriven_at is null and d.scope = s.name and d.reason = r.reason limit %(most)s + 1) as d
        limit %(most)s + 1) as d
) as counted
order by 2 desc, 1

-- name: stale_leases
-- Workers whose lease has been over for a minute, and whose sagas no other worker has taken; up to `most` sagas are
-- counted.
with recursive {owners}
select o.worker, w.name, extract(epoch from clock_timestamp() - w.until)::float8 as seconds,
    (select count(*) from (select 1 from {schema}.saga as s where s.worker = o.worker limit %(most)s + 1) as s) as sagas
from owner as o left join {schema}.worker as w on w.id = o.worker
where o.worker is not null and (w.id is null or w.until < clock_timestamp() - interval '1 minute')
order by o.worker

-- name: old_transactions
-- Transactions of this database, including those that are prepared and not decided: rows that were deleted since they
-- began cannot be vacuumed. Their statements are left out, since these quote rows. Only members of pg_read_all_stats
-- see other roles'.
select a.pid::text as who, a.usename::text as role, coalesce(nullif(a.application_name, ''), a.backend_type) as program, a.state,
    extract(epoch from clock_timestamp() - a.xact_start)::float8 as seconds
from pg_stat_activity as a
where a.datname = current_database() and a.xact_start < clock_timestamp() - make_interval(secs => %(seconds)s)
  and a.pid <> pg_backend_pid()
union all
select quote_literal(p.gid), p.owner::text, 'two-phase commit', 'prepared',
    extract(epoch from clock_timestamp() - p.prepared)::float8
from pg_prepared_xacts as p
where p.database = current_database() and p.prepared < clock_timestamp() - make_interval(secs => %(seconds)s)
order by seconds desc

-- name: table_sizes
-- The size of our tables, and the size that their rows should need: the widths that ANALYZE has measured, with a
-- header, and a fifth of free space; null before the first ANALYZE. Large values, which are stored outside of the
-- table, are in neither.
select c.relname::text as name, pg_relation_size(c.oid) as bytes, t.n_live_tup as live, t.n_dead_tup as dead,
    extract(epoch from clock_timestamp() - greatest(t.last_vacuum, t.last_autovacuum))::float8 as vacuumed,
    (select case when c.reltuples >= 0 then c.reltuples * (28 + sum(s.avg_width)) * 1.25 end
     from pg_stats as s where s.schemaname = n.nspname and s.tablename = c.relname)::float8 as expected
from pg_class as c
join pg_namespace as n on n.oid = c.relnamespace
join pg_stat_user_tables as t on t.relid = c.oid
where n.nspname = {schema_name} and c.relkind = 'r'
order by c.relname

-- name: some_scopes
select name from {schema}.scope order by id limit %(most)s
