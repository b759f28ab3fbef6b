-- Work that is accepted now and done later. queries.py describes the format: {schema} is the configured schema,
-- {PENDING} the number stored for that state.

-- name: accept
-- Stored with the record, in its commit, with its time (H49). `max_age` is null if it can never be too late (H44).
select {schema}.accept(%(key)s::bytea, %(app)s, %(handler)s, %(max_age)s::float8, %(via)s::text, %(token)s::bytea,
    %(asked)s::boolean, %(body)s::bytea, %(headers)s::jsonb)

-- name: accepted
-- H42. Only records of this scope: the id may come from another tenant (H48). A PENDING record whose key is locked (J1)
-- is being run. The lock is read and not tried: a concurrent claim would see the key as busy.
select r.state, s.body, s.content_type, s.status, s.headers,
    r.state = {PENDING} and exists (
        select from pg_locks as l
        where l.locktype = 'advisory' and l.objsubid = 1 and l.granted
          and l.database = (select oid from pg_database where datname = current_database())
          and l.classid = ('x' || encode(substring(w.key for 4), 'hex'))::bit(32)::bigint::oid
          and l.objid = ('x' || encode(substring(w.key from 5 for 4), 'hex'))::bit(32)::bigint::oid
    ) as held,
    (select d.reason from {schema}.dead_letter as d where d.key = w.key and r.state = {DEAD} order by d.id desc limit 1),
    (select (extract(epoch from a.created_at) * 1000000)::bigint from {schema}.accepted as a where a.key = w.key)
from (select %(key)s::bytea as key) as w
join lateral (select state, scope_id from {schema}.record where key = w.key and {counts} offset 0) as r on true
join {schema}.scope as c on c.id = r.scope_id and c.name = %(scope)s
left join {schema}.result as s on s.key = w.key

-- name: overdue
-- H44. Whether there is anything to do, without a transaction that writes.
select a.key from {schema}.accepted as a
where a.until <= (select clock_timestamp())
  and (a.app, a.handler) in (select * from unnest(%(apps)s::text[], %(names)s::text[]))
order by a.until limit %(limit)s

-- name: time_out
-- H44. A record that still waits becomes FAILED, unless a worker runs it: this takes the claim's lock (J1), so that
-- only one of them decides. Each row is taken by one sweeper; with `asked`, by the one that asked last (H47). A message
-- that has begun or ended has nothing to wait for here.
with due as materialized (
    select a.key from {schema}.accepted as a
    where a.key = any(%(keys)s::bytea[])
      and case when %(asked)s::integer is null then a.until <= clock_timestamp() else a.asked = %(asked)s::integer end
    order by a.key for update skip locked
), ended as (
    update {schema}.record as r set state = {FAILED}, changed_at = clock_timestamp()
    where r.key = any(array(select key from due)) and r.state = {PENDING}
      and pg_try_advisory_xact_lock(('x' || encode(substring(r.key for 8), 'hex'))::bit(64)::bigint)
    returning r.key
), stored as (
    insert into {schema}.result (key, body, content_type, status)
    select key, %(body)s, %(content_type)s, %(status)s from ended
), forgotten as (
    delete from {schema}.attempt where key = any(array(select key from ended))
), over as (
    update {schema}.accepted set until = null, token = null, body = null, headers = null where key = any(array(
        select key from ended
        union all
        select d.key from due as d
        where not exists (select from {schema}.record as r where r.key = d.key and r.state = {PENDING})
    ))
)
select key from ended

-- name: take_overdue
-- H47. One message to ask about, which no other process takes for %(taken)s seconds; or one that has ended, for good.
-- It counts as failed until there is an answer: a process that the question kills cannot report it.
with due as materialized (
    select a.key, exists (select from {schema}.record as r where r.key = a.key and r.state = {PENDING}) as waits
    from {schema}.accepted as a
    where a.until <= (select clock_timestamp())
      and (a.app, a.handler) in (select * from unnest(%(apps)s::text[], %(names)s::text[]))
    order by a.until limit 1 for update of a skip locked
)
update {schema}.accepted as a
set asked = a.asked + 1, failed = a.failed + 1,
    until = case when due.waits then clock_timestamp() + make_interval(secs => %(taken)s) end,
    body = case when due.waits then a.body end, headers = case when due.waits then a.headers end
from due where a.key = due.key
returning a.key, a.app, a.handler, due.waits, a.body, a.headers, a.asked, a.failed

-- name: lock_accepted
-- The lock of a claim (J1), without waiting.
select pg_try_advisory_xact_lock(('x' || encode(substring(%(key)s::bytea for 8), 'hex'))::bit(64)::bigint)

-- name: see_accepted
-- In a statement after that of the lock, whose snapshot may be older: whether it still waits, and we asked last.
select 1 from {schema}.record as r join {schema}.accepted as a on a.key = r.key
where r.key = %(key)s and r.state = {PENDING} and a.asked = %(asked)s

-- name: complete_accepted
with ended as (
    update {schema}.record set state = {COMPLETED}, changed_at = clock_timestamp() where key = %(key)s
)
update {schema}.accepted set until = null, token = null, body = null, headers = null where key = %(key)s

-- name: ask_later
update {schema}.accepted
set until = clock_timestamp() + make_interval(secs => %(after)s), failed = %(failed)s
where key = %(key)s and asked = %(asked)s
