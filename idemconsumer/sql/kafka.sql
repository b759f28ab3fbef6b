-- Positions in Kafka's partitions, one statement per name. queries.py describes the format.

-- name: kafka_positions
-- One row without a topic if there are no positions: its time identifies the server that has answered.
select s.started, p.topic, p.partition, p.history, p.base, p.counter, p.position, p.quiet, p.leader
from (select pg_postmaster_start_time()) as s (started)
left join {schema}.kafka_position as p
    on p.cluster = %(cluster)s and p.group_name = %(group)s and p.topic = any(%(topics)s::text[])

-- name: begin_kafka_positions
-- The counter grows. So a former owner that is late cannot report that this reading is over (K10), and an older offset
-- in Kafka is noticed (K19).
insert into {schema}.kafka_position as k
    (cluster, group_name, topic, partition, history, base, counter, position, leader, changed_at)
select %(cluster)s, %(group)s, w.topic, w.partition, w.history, w.base, w.counter, w.position, w.leader,
       clock_timestamp()
from unnest(%(topics)s::text[], %(partitions)s::integer[], %(histories)s::text[], %(bases)s::bigint[],
            %(counters)s::bigint[], %(positions)s::bigint[], %(leaders)s::integer[])
    as w (topic, partition, history, base, counter, position, leader)
where pg_postmaster_start_time() = %(server)s
order by w.topic, w.partition
on conflict (cluster, group_name, topic, partition) do update
set history = excluded.history, base = excluded.base, counter = greatest(k.counter + 1, excluded.counter),
    position = case k.history when excluded.history then k.position else excluded.position end,
    leader = case k.history when excluded.history then coalesce(k.leader, excluded.leader) else excluded.leader end,
    quiet = null, changed_at = excluded.changed_at
returning topic, partition, counter

-- name: save_kafka_positions
-- Only on the server that has the effects of the messages below the position (K12). The rows are locked in one order,
-- since a former owner may be writing too.
with w as materialized (
    select p.cluster, p.group_name, p.topic, p.partition, given.position, given.leader, given.counter
    from unnest(%(topics)s::text[], %(partitions)s::integer[], %(histories)s::text[], %(positions)s::bigint[],
                %(leaders)s::integer[], %(left)s::bigint[])
        as given (topic, partition, history, position, leader, counter)
    cross join lateral (
        select * from {schema}.kafka_position as k
        where k.cluster = %(cluster)s and k.group_name = %(group)s and k.topic = given.topic
          and k.partition = given.partition and k.history = given.history
        offset 0
    ) as p
    where pg_postmaster_start_time() = %(server)s
    order by p.topic, p.partition
    for update of p
)
update {schema}.kafka_position as k
set counter = k.counter + 1, position = w.position, leader = w.leader,
    quiet = case k.counter when w.counter then k.counter + 1 end, changed_at = clock_timestamp()
from w where (k.cluster, k.group_name, k.topic, k.partition) = (w.cluster, w.group_name, w.topic, w.partition)
returning k.topic, k.partition, k.counter

-- name: stop_kafka_partition
insert into {schema}.kafka_stop as s (cluster, group_name, topic, partition, first, next, error, since, seen_at)
values (%(cluster)s, %(group)s, %(topic)s, %(partition)s, %(first)s, %(next)s, %(error)s, clock_timestamp(),
        clock_timestamp())
on conflict (cluster, group_name, topic, partition, first) do update
set next = excluded.next, error = excluded.error, seen_at = excluded.seen_at
returning skip

-- name: list_kafka_stops
select group_name as "group", topic, partition, first, next, error, since, seen_at
from {schema}.kafka_stop
where not skip
  and (%(topic)s::text is null or topic = %(topic)s and partition = %(partition)s and first = %(first)s)
  and (%(group)s::text is null or group_name = %(group)s)
order by topic, partition, first, group_name

-- name: skip_kafka_stop
update {schema}.kafka_stop set skip = true
where topic = %(topic)s and partition = %(partition)s and first = %(first)s and group_name = %(group)s

-- name: leave_kafka_stop
-- The messages could be read after all.
delete from {schema}.kafka_stop
where cluster = %(cluster)s and group_name = %(group)s and topic = %(topic)s and partition = %(partition)s and not skip
