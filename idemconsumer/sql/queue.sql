-- The queue behind `postgres:` sources. queries.py describes the format: {schema} is the configured schema.

-- name: enqueue
-- A queue's name may be any text, such as kafka:orders.
select {schema}.publish_bytes('postgres:' || %(name)s, %(body)s, %(key)s, %(headers)s)

-- name: enqueue_later
select {schema}.publish_bytes('postgres:' || %(name)s, %(body)s, %(key)s, %(headers)s, make_interval(secs => %(delay)s))

-- name: raise_low_water
-- P9. Returns how many numbers there are above it now, 0 if the first of them is a message.
select {schema}.raise_low_water(%(line)s, %(name)s)

-- fragment: queue_low
-- P9. No message of the queue `w.name` is before this place.
(select {schema}.low_water_of('queue', w.name))

-- fragment: delayed_low
-- And no delayed message is due before this time.
to_timestamp((select {schema}.low_water_of('delayed', w.name)) / 1e6)

-- fragment: outbox_low
(select {schema}.low_water_of('outbox', w.name))

-- fragment: outbox_due_low
to_timestamp((select {schema}.low_water_of('outbox_due', '')) / 1e6)

-- name: fall_due
-- Moves due messages into their queue, at the end and in the order in which they were due (P7). The time is in a
-- sub-select: as a volatile function it could not limit the index scan, which would walk over all delayed messages.
with due as (
    delete from {schema}.delayed where id = any(array(
        select d.id from unnest(%(names)s::text[]) as w (name) cross join lateral (
            select id from {schema}.delayed
            where name = w.name and due_at >= {delayed_low} and due_at <= (select clock_timestamp())
            order by due_at limit %(limit)s for update skip locked
        ) as d
    ))
    returning name, message_id, body, headers, due_at
)
insert into {schema}.queue (name, message_id, body, headers)
select name, message_id, body, headers from due order by due_at
returning name

-- name: put_off
-- In the transaction that makes its record PENDING (D18). The queue's row that it came from is replaced, if this
-- process still has it: so each PENDING record has one row (D20).
with gone as (
    delete from {schema}.queue where id = %(id)s::bigint and token = %(token)s::bigint returning id
)
insert into {schema}.delayed (name, message_id, body, headers, due_at)
select %(name)s, %(message_id)s, %(body)s, %(headers)s::bytea, clock_timestamp() + make_interval(secs => %(after)s)
where %(id)s::bigint is null or exists (select from gone)
returning id

-- fragment: outbox_look
-- X8. Whether a message can be sent to another broker, for relays: they ask for it under the name of a queue.
(select clock_timestamp() from {schema}.line where w.name = 'outbox:' and line = 'outbox' limit 1)
union all
(select due_at from {schema}.outbox
where w.name = 'outbox:' and due_at >= {outbox_due_low} and due_at <= (select clock_timestamp())
  and due_at is not null and parked_at is null
order by due_at limit 1)

-- fragment: messages
-- In how many seconds a message of each of these queues can be taken, if that is soon (L61): at most 0 if one can be
-- now. Of each queue only the first visible row is read, and the first delayed one.
messages (name, seconds) as (
    select w.name, extract(epoch from min(next.at) - clock_timestamp())::float8
    from unnest(%(queues)s::text[]) as w (name)
    cross join lateral (
        (select visible_at as at from {schema}.queue
        where name = w.name and coalesce(moved, id) >= {queue_low} and visible_at <= clock_timestamp()
        order by coalesce(moved, id) limit 1)
        union all
        (select due_at from {schema}.delayed
        where name = w.name and due_at >= {delayed_low}
          and due_at <= (select clock_timestamp() + make_interval(secs => %(ahead)s))
        order by due_at limit 1)
        union all
        {outbox_look}
    ) as next
    group by w.name
    union all
    -- For those who are not told (P11).
    (select 'control:', id::float8 from {schema}.audit where 'control:' = any(%(queues)s::text[]) order by id desc limit 1)
)

-- name: look_for_messages
with {messages} select name, seconds from messages

-- name: lead
-- P11. Whether this session is the leader, as long as it lasts, and how many other sessions ask.
select pg_try_advisory_lock(crew.key), (
    select count(*) from pg_locks
    where locktype = 'advisory' and database = (select oid from pg_database where datname = current_database())
      and objsubid = 1 and classid::bigint << 32 | objid::bigint = crew.key # 1 and pid <> pg_backend_pid()
) from (
    select hashtextextended('idemconsumer.listen.' || {schema_name} || '.' || %(queues)s, 0) as key offset 0
) as crew where pg_try_advisory_lock_shared(crew.key # 1)

-- name: take
-- The next visible messages; those that other processes are taking are skipped (P2). Each delivery has a token of its
-- own, so that settling an expired delivery has no effect (P1). The token begins with the number of its taker (P8).
-- Returns the first message in any case, and as many as begin within so many bytes (D8); of each queue up to its limit.
-- Of a body that is too large to be taken, only the beginning (`most`), and the whole's size and hash. The first
-- columns are the message's place, and how many numbers above the low water that is (P9). By an array: a join would
-- read a whole table that was empty when it was analyzed.
with visible as materialized (
    select q.id, q.size, q.place, q.place - l.low as behind
    from unnest(%(names)s::text[], %(limits)s::integer[]) as w (name, most)
    cross join lateral (select {queue_low} as low offset 0) as l
    cross join lateral (
        select id, coalesce(moved, id) as place, least(octet_length(body), %(most)s::integer) + octet_length(headers) as size
        from {schema}.queue
        where name = w.name and coalesce(moved, id) >= l.low and visible_at <= clock_timestamp()
        order by coalesce(moved, id) limit w.most for update skip locked
    ) as q
), next as materialized (
    select id, place, behind from (select *, sum(size) over (order by place) - size as before from visible) as sized
    where before < %(bytes)s
)
update {schema}.queue as q
set deliveries = q.deliveries + 1, token = %(taker)s::bigint + nextval('{schema}.queue_token'),
    visible_at = clock_timestamp() + make_interval(secs => %(visibility)s)
from next where q.id = any(array(select id from next)) and q.id = next.id
returning next.place, next.behind, q.id, q.name, q.token, q.deliveries, q.message_id,
    case when octet_length(q.body) <= %(most)s::integer then q.body else substring(q.body for %(most)s::integer) end, q.headers,
    octet_length(q.body), case when octet_length(q.body) > %(most)s::integer then sha256(q.body) end

-- name: extend
-- A message that has been in flight for long is moved behind all others, so that it does not hold the low water back
-- (P9).
update {schema}.queue set visible_at = clock_timestamp() + make_interval(secs => %(visibility)s),
    moved = case when id = any(%(long)s) then nextval('{schema}.queue_id_seq') else moved end
where id = any(%(ids)s) and token = any(%(delivery_tokens)s)

-- name: finish
-- Delivery tokens are unique over all deliveries, so two arrays need no pairing.
delete from {schema}.queue where id = any(%(ids)s) and token = any(%(delivery_tokens)s)

-- name: give_back
-- Never started: visible again at once, as if it had not been delivered (P4).
update {schema}.queue set visible_at = clock_timestamp(), deliveries = greatest(deliveries - 1, 0), token = null
where id = any(%(ids)s) and token = any(%(delivery_tokens)s)

-- name: give_back_unseen
-- Messages that a taker took whose answer was lost (P8). They were at the front of their queue, among those in flight.
update {schema}.queue set visible_at = clock_timestamp(), deliveries = greatest(deliveries - 1, 0), token = null
where token between %(taker)s::bigint and %(taker)s::bigint + %(tokens)s::bigint and id = any(array(
    select q.id from unnest(%(names)s::text[]) as w (name) cross join lateral (
        select id from {schema}.queue
        where name = w.name and coalesce(moved, id) >= {queue_low} order by coalesce(moved, id) limit %(front)s
    ) as q
))

-- name: let_go
-- Perhaps begun, and not ended: visible again at once, and delivered once more (P8).
update {schema}.queue set visible_at = clock_timestamp(), token = null
where id = any(%(ids)s) and token = any(%(delivery_tokens)s)

-- name: waiting
-- How many can run, including those in flight, and how many are not due yet.
select coalesce(sum(ready.messages + due.messages), 0)::bigint, coalesce(sum(later.messages), 0)::bigint
from unnest(%(names)s::text[]) as w (name)
cross join lateral (
    select count(*) as messages from {schema}.queue where name = w.name and coalesce(moved, id) >= {queue_low}
) as ready
cross join lateral (
    select count(*) as messages from {schema}.delayed
    where name = w.name and due_at >= {delayed_low} and due_at <= (select clock_timestamp())
) as due
cross join lateral (
    select count(*) as messages from {schema}.delayed where name = w.name and due_at > (select clock_timestamp())
) as later

-- name: begin_schedule
-- L53. Its first slot is the next one. That is also so if another rule was in force meanwhile: then that rule's note is
-- more than a day newer. Once a day a worker notes that it reads the schedule.
insert into {schema}.schedule (app, name, rule, last) values (%(app)s, %(name)s, %(rule)s, clock_timestamp())
on conflict (app, name, rule) do update set looked_at = clock_timestamp(), last = case when exists (
    select from {schema}.schedule as other where other.app = schedule.app and other.name = schedule.name
        and other.looked_at > schedule.looked_at + interval '1 day'
) then clock_timestamp() else schedule.last end
where schedule.looked_at < clock_timestamp() - interval '1 day'

-- name: read_schedules
-- Schedules with such a note within the last day; `begin_schedule` writes it for the others.
select s.name, s.rule, s.last, clock_timestamp() from {schema}.schedule as s
where s.app = %(app)s and (s.name, s.rule) in (select * from unnest(%(names)s::text[], %(rules)s::text[]))
  and s.looked_at >= clock_timestamp() - interval '1 day'

-- name: prune_schedules
-- L53: no worker has read them for so long that their app or rule must be gone.
delete from {schema}.schedule where looked_at < clock_timestamp() - interval '90 days'

-- name: advance_schedule
-- L53. Of several workers that have read the same row, one advances it, and starts what is due in the same transaction.
update {schema}.schedule set last = %(last)s
where app = %(app)s and name = %(name)s and rule = %(rule)s and last = %(seen)s
