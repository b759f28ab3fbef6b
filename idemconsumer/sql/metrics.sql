-- The launcher's queries about the database for its metrics, at most every quarter of a minute (O11). queries.py
-- describes the
-- format: {schema} is the configured schema, {UNDOING} the number stored for that state, {held} a fragment of sagas.sql.

-- name: measure_queues
-- For these queues: messages that can be taken, up to a hundred thousand, and for how long the first one could; and
-- those not due yet.
select w.name, ready.messages + fallen.messages, greatest(0, first.seconds, fallen.seconds)::float8, later.messages
from unnest(%(names)s::text[]) as w (name)
cross join lateral (
    select count(*) as messages from (
        select from {schema}.queue
        where name = w.name and coalesce(moved, id) >= {queue_low} and visible_at <= (select clock_timestamp())
        limit 100000) as q
) as ready
cross join lateral (
    select max(q.seconds) as seconds from (
        select extract(epoch from clock_timestamp() - visible_at) as seconds from {schema}.queue
        where name = w.name and coalesce(moved, id) >= {queue_low} and visible_at <= (select clock_timestamp())
        order by coalesce(moved, id) limit 1) as q
) as first
cross join lateral (
    select count(*) as messages, extract(epoch from clock_timestamp() - min(q.due_at)) as seconds from (
        select due_at from {schema}.delayed
        where name = w.name and due_at >= {delayed_low} and due_at <= (select clock_timestamp())
        order by due_at limit 100000) as q
) as fallen
cross join lateral (
    select count(*) as messages from (
        select from {schema}.delayed
        where name = w.name and due_at > (select clock_timestamp()) limit 100000) as q
) as later

-- name: measure_sagas
-- By state as in `saga_list`; and how many of them a worker could take now, and for how long. The app's name is quoted,
-- as in a scope's.
select coalesce(s.app, split_part(c.name, '/', 1)), s.handler, line.state, count(*),
    extract(epoch from clock_timestamp() - min(s.started_at))::float8, count(*) filter (where line.free),
    greatest(0, extract(epoch from clock_timestamp() - min(s.due) filter (where line.free)))::float8
from {schema}.saga as s
join {schema}.scope as c on c.id = s.scope_id
cross join lateral (
    select case when s.parked is not null then 'dead' when s.state = {UNDOING} then 'undoing' else 'processing' end,
        s.parked is null and case when s.worker is null then s.due <= (select clock_timestamp()) else not {held} end
) as line (state, free)
group by 1, 2, 3

-- name: measure_letters
-- Dead letters that were not redriven, from an index alone. App and handler are quoted.
select split_part(d.scope, '/', 1), split_part(d.scope, '/', 3), d.reason, sum(d.letters)::bigint,
    extract(epoch from clock_timestamp() - min(d.oldest))::float8
from (
    select scope, reason, count(*) as letters, min(first_at) as oldest from {schema}.dead_letter
    where redriven_at is null group by scope, reason
) as d
group by 1, 2, 3

-- name: measure_forwards
-- O19: dead letters that wait to be forwarded, up to a hundred thousand, and for how long the first of each handler has
-- waited.
-- App and handler are quoted.
select split_part(d.scope, '/', 1), split_part(d.scope, '/', 3), count(*),
    extract(epoch from clock_timestamp() - min(o.created_at))::float8
from (select letter, created_at from {schema}.outbox where letter is not null limit 100000) as o
join {schema}.dead_letter as d on d.id = o.letter
group by 1, 2

-- name: measure_leases
-- Leases of live workers, and of lost workers whose sagas no other worker has taken yet.
select count(*) filter (where w.until >= clock_timestamp()),
    count(*) filter (where w.until < clock_timestamp() and exists (select from {schema}.saga where worker = w.id))
from {schema}.worker as w

-- name: measure_pruning
-- When a pass of the pruner last ended (R27); null before the first one.
select extract(epoch from max(ended_at))::float8 from {schema}.upkeep where what = 'records'
