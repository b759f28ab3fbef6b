-- The queue behind `postgres:` sources. queries.py describes the format: {schema} is the configured schema.

-- name: enqueue
select {schema}.publish_bytes(%(name)s, %(body)s, %(key)s, %(headers)s)

-- name: take
-- The next visible messages; those that others are taking are passed over (P2). Each delivery has a token of its own,
-- so that settling an expired delivery has no effect (P1).
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

-- name: extend
update {schema}.queue set visible_at = clock_timestamp() + make_interval(secs => %(visibility)s)
where id = any(%(ids)s) and token = any(%(delivery_tokens)s)

-- name: finish
-- Delivery tokens are unique over all deliveries, so two arrays need no pairing.
delete from {schema}.queue where id = any(%(ids)s) and token = any(%(delivery_tokens)s)

-- name: give_back
-- Never started: visible again at once, as if it had not been delivered (P4).
update {schema}.queue set visible_at = clock_timestamp(), deliveries = greatest(deliveries - 1, 0), token = null
where id = any(%(ids)s) and token = any(%(delivery_tokens)s)

-- name: waiting
select count(*) from {schema}.queue where name = %(name)s
