-- Outgoing messages on their way to other brokers (X1). queries.py describes the format: {schema} is the configured schema.

-- name: store_outgoing
select {schema}.publish_bytes(%(destination)s, %(body)s, %(key)s, %(headers)s, make_interval(secs => %(delay)s))

-- name: outbox_destinations
-- Destinations with a message that can be sent now, including messages that are due but not moved yet.
with fallen as (
    select destination from {schema}.outbox
    where due_at >= {outbox_due_low} and due_at <= (select clock_timestamp()) and due_at is not null and parked_at is null
    order by due_at limit %(limit)s
)
select name from {schema}.line where line = 'outbox' union select destination from fallen

-- name: fall_due_outgoing
-- Messages that could not be sent, or were published with a delay, are in no index of ready ones, so no query walks
-- over them. A refused message keeps its place in its order (X5); one that was published with a delay gets its place
-- now (P9).
update {schema}.outbox set due_at = null, created_at = case when tries = 0 then due_at else created_at end,
    id = case when tries = 0 then nextval('{schema}.outbox_id_seq') else id end
where id = any(array(
    select id from {schema}.outbox
    where due_at >= {outbox_due_low} and due_at <= (select clock_timestamp()) and due_at is not null and parked_at is null
      and destination = %(destination)s
    order by due_at limit %(limit)s for update skip locked
))
returning id

-- name: lock_outgoing
-- X4. Held until the end of the transaction, which waits for the broker.
select pg_try_advisory_xact_lock(hashtextextended('idemconsumer.outbox.' || {schema_name} || '.' || %(destination)s, 0)),
    set_config('idle_in_transaction_session_timeout', %(idle)s, true)

-- name: read_outgoing
-- In a statement after that of the lock: only its snapshot shows which rows the last owner of the lock has deleted. A
-- message behind a refused one of the same order stays (X5). `offset 0` makes that a lookup; a join would read all
-- refused ones. Returns the first message in any case, and as many as begin within so many bytes. By an array, as
-- `take`.
with ready as materialized (
    select o.id, coalesce(
        (select octet_length(d.body) + octet_length(d.headers) from {schema}.dead_letter as d where d.id = o.letter),
        octet_length(o.body) + octet_length(o.headers)) as size
    from (values (%(destination)s::text)) as w (name) join {schema}.outbox as o on o.destination = w.name
    where o.id >= {outbox_low} and o.due_at is null and o.parked_at is null
      and (o.order_key is null or not exists (
          select from {schema}.outbox as h
          where h.destination = o.destination and h.order_key = o.order_key and h.id < o.id
            and h.tries > 0 and h.due_at is not null and h.parked_at is null
          offset 0
      ))
    order by o.id limit %(limit)s
), next as materialized (
    select id from (select id, sum(size) over (order by id) - size as before from ready) as sized
    where before < %(bytes)s
)
select o.id, o.message_id::text, o.key, o.order_key, o.tries, o.headers, o.body, o.letter
from {schema}.outbox as o where o.id = any(array(select id from next)) order by o.id

-- name: read_letters
-- O19. The dead letters as they are now: data that was dropped from them meanwhile is not sent.
select d.id, d.handler, d.source, d.position, d.reason,
    case when {schema}.error_place(d.error) is not null then {schema}.error_type(d.error) end,
    d.body, d.headers, d.delivered, coalesce(d.body_size, length(d.body)), coalesce(d.body_sha256, sha256(d.body))
from {schema}.dead_letter as d where d.id = any(%(letters)s)

-- name: lock_letters
-- Before their rows of the outbox, in the order in which each transaction that writes or deletes a dead letter locks
-- them.
select id from {schema}.dead_letter where id = any(%(letters)s) order by id for no key update

-- name: forget_outgoing
-- X2. Once they are confirmed. A dead letter that was written again meanwhile has another row, and is not forwarded
-- yet.
with gone as (
    delete from {schema}.outbox where id = any(%(ids)s) returning letter
)
update {schema}.dead_letter set forwarded_at = clock_timestamp()
where id = any(array(select letter from gone where letter is not null))

-- name: hold_outgoing
-- X5. A message that is refused for its own sake. Its order continues once it is parked.
update {schema}.outbox as o set tries = o.tries + 1, error = w.error,
    due_at = case when w.after is not null then clock_timestamp() + make_interval(secs => w.after) end,
    parked_at = case when w.after is null then clock_timestamp() end
from unnest(%(ids)s::bigint[], %(errors)s::text[], %(afters)s::float8[]) as w (id, error, after)
where o.id = w.id

-- fragment: chosen_outgoing
(%(ids)s::bigint[] is null or o.id = any(%(ids)s::bigint[]))
and (%(destination)s::text is null or o.destination = %(destination)s)
and (%(key)s::text is null or o.key = %(key)s)
and (%(error)s::text is null or strpos(o.error, %(error)s) > 0)
and (%(since)s::float8 is null or o.created_at >= clock_timestamp() - make_interval(secs => %(since)s))
and (not %(parked)s or o.parked_at is not null)

-- name: list_outgoing
-- Oldest first, as they are sent. `tries`: how many times its broker has refused it, last with `error`; `due_at`: when
-- it is sent at the earliest, null: now. `message_id` is the same each time that it is sent. `size` is that of its
-- body. A forwarded dead letter is listed with its message itself.
select o.id, o.destination, o.message_id::text as message_id, o.key, o.tries, o.error, o.created_at, o.due_at, o.parked_at,
    octet_length(coalesce((select d.body from {schema}.dead_letter as d where d.id = o.letter), o.body)) as size
from {schema}.outbox as o where {chosen_outgoing} and o.id > %(after)s order by o.id limit %(limit)s

-- name: show_outgoing
select o.id, o.destination, o.message_id::text as message_id, o.key, o.tries, o.error, o.created_at, o.due_at, o.parked_at,
    octet_length(coalesce(d.body, o.body)) as size, coalesce(d.headers, o.headers) as headers, coalesce(d.body, o.body) as body
from {schema}.outbox as o left join {schema}.dead_letter as d on d.id = o.letter
where o.id = %(id)s

-- name: retry_outgoing
-- Only messages that no relay is sending: parked ones, and those that wait for their next try. One that was parked
-- comes last (P9).
with chosen as (
    select o.id from {schema}.outbox as o
    where {chosen_outgoing} and o.tries > 0 and (o.due_at is not null or o.parked_at is not null) for update
), again as (
    update {schema}.outbox as o set tries = 0, due_at = null, parked_at = null,
        id = case when o.parked_at is null then o.id else nextval('{schema}.outbox_id_seq') end
    where o.id = any(array(select id from chosen))
    returning o.destination
), told as (
    select pg_notify('idemconsumer_queue', 'outbox:' || left(destination, 1000)) from (select distinct destination from again) as d
)
select (select count(*) from again) as changed, (select count(*) from told) as told

-- name: discard_outgoing
with chosen as (
    select o.id from {schema}.outbox as o where {chosen_outgoing} for update
), gone as (
    delete from {schema}.outbox as o where o.id = any(array(select id from chosen)) returning o.id
)
select count(*) as changed from gone

-- name: count_outgoing
select count(*) as changed from {schema}.outbox as o where {chosen_outgoing}

-- name: status_outbox
-- For each destination: up to `most` messages that can be sent, the oldest for so many seconds; those that are to be
-- sent later, since they were published so or refused, perhaps with this `error`; and those that wait for a person.
-- `more`: there are more.
with others as (
    select destination from (
        select destination from {schema}.outbox where due_at is not null and parked_at is null order by due_at limit %(most)s
    ) as d
    union
    select destination from (
        select destination from {schema}.outbox where parked_at is not null order by destination, id limit %(most)s
    ) as p
), named as (
    select name from {schema}.line where line = 'outbox' union select destination from others
)
select w.name as destination, r.waiting, r.oldest, l.later, p.parked, l.error,
    r.waiting > %(most)s or l.later > %(most)s or p.parked > %(most)s as more
from named as w
cross join lateral (
    select count(*) as waiting, extract(epoch from clock_timestamp() - min(o.created_at))::float8 as oldest
    from (select created_at from {schema}.outbox
        where destination = w.name and id >= {outbox_low} and due_at is null and parked_at is null
        order by id limit %(most)s + 1) as o
) as r
cross join lateral (
    select count(*) as later, max(o.error) as error
    from (select error from {schema}.outbox
        where destination = w.name and due_at is not null and parked_at is null order by due_at limit %(most)s + 1) as o
) as l
cross join lateral (
    select count(*) as parked
    from (select from {schema}.outbox
        where destination = w.name and parked_at is not null order by id limit %(most)s + 1) as o
) as p
order by w.name
