-- Requests in leased mode: a claim is committed first, and is ended by its token. queries.py describes the format:
-- {schema} is the configured schema, {PROCESSING} the number stored for that state, {held} a fragment of sagas.sql.

-- name: claim_request
-- H20, H22. See the function (migrations/0006).
select (c.missed).*, c.token, c.free from {schema}.claim_request(%(claims)s::{schema}.claim[], %(worker)s) as c

-- name: take_request
-- H22. By the token that was seen to be free: of two processes that take it, the second one meets another token. A
-- request that is ours already was claimed by a call whose answer was lost, so nothing has run under it (H23). Worker 0
-- means none. Returns when the former owner began: its effects, if there are any, date from then.
with seen as materialized (
    select key, token, started_at from {schema}.request where key = %(key)s and token = %(free)s for update
)
update {schema}.request as s
set token = greatest(s.token + 1, nextval('{schema}.saga_token')), worker = %(worker)s, started_at = clock_timestamp(),
    again = s.again or s.worker <> %(worker)s
from seen
where s.key = seen.key and s.token = seen.token and (%(again)s or s.worker = %(worker)s and not s.again)
  and exists (select from {schema}.worker as w where w.id = %(worker)s and w.until > clock_timestamp())
returning s.token, s.again, (extract(epoch from seen.started_at) * 1000000)::bigint

-- name: complete_request
-- H21. See the function (migrations/0006). Returns a row if it was ours.
select 1 where {schema}.complete_request(%(key)s, %(token)s, %(state)s::smallint, %(result)s, %(content_type)s,
    %(status)s::smallint, %(sent)s)

-- name: settle_lost_request
-- H36, O16. As `complete_request`, but only while no process has a valid lease for it, which is checked in the locked
-- row.
with fenced as materialized (
    select s.key from {schema}.request as s where s.key = %(key)s and s.token = %(token)s and not {held} for update
), ended as materialized (
    select key from fenced where {schema}.complete_request(key, %(token)s, %(state)s::smallint, %(result)s,
        %(content_type)s, %(status)s::smallint, %(sent)s)
), noted as (
    insert into {schema}.audit (at, by, role, what, target)
    select clock_timestamp(), %(by)s, session_user, 'settle', 'request ' || left(encode(key, 'hex'), 12) from ended
)
select key from ended

-- name: drop_request
-- After `lock_key`, so that a concurrent claim of the key, ours or a rival's, is decided. Without a token: whatever
-- this worker has claimed of it (H23). If a former owner was lost, or this one `ran` and it is unknown how far, the row
-- stays without an owner, so that the next owner learns of that, and since when.
with dropped as (
    select key, again or %(ran)s as again from {schema}.request
    where key = %(key)s and case when %(token)s::bigint is null then worker = %(worker)s else token = %(token)s end
    for update
), left_behind as (
    update {schema}.request set worker = 0, again = true, started_at = coalesce(%(since)s::timestamptz, started_at)
    where key in (select key from dropped where again)
), gone as (
    delete from {schema}.request where key in (select key from dropped where not again) returning key
)
delete from {schema}.record where key in (select key from gone) and state = {PROCESSING}

-- name: status_requests
-- For all tenants of a route together, the first since `oldest`: `running`, or `lost` with the process that ran them.
-- At most `most` rows are read.
select split_part(c.name, '/', 1) as app, split_part(c.name, '/', 3) as route, count(*) filter (where s.held) as running,
    count(*) filter (where not s.held) as lost, min(s.started_at) as oldest,
    sum(count(*)) over () > %(most)s as more
from (select s.scope_id, s.started_at, {held} as held from {schema}.request as s limit %(most)s + 1) as s
join {schema}.scope as c on c.id = s.scope_id
where %(scopes)s::text is null or starts_with(c.name, %(scopes)s)
group by 1, 2 order by 1, 2

-- name: abandoned_requests
-- H24. Up to `most` requests, by handler: no process has a valid lease for them, and no client has retried them.
select c.name as scope, count(*) as requests, min(s.started_at) as oldest
from (select * from {schema}.request as s where not {held} order by s.started_at limit %(most)s + 1) as s
join {schema}.scope as c on c.id = s.scope_id
group by 1 order by 1

-- name: lost_requests
-- H36. All of them: a process that is gone has left as many as it was running.
select s.key, c.name, (extract(epoch from s.started_at) * 1000000)::bigint, s.token
from {schema}.request as s join {schema}.scope as c on c.id = s.scope_id
where not {held} order by s.started_at

-- name: release_lost_request
-- H36. After `lock_key`. By the token that was seen: if the request was taken since and lost again, that is another
-- loss.
with gone as (
    delete from {schema}.request as s where s.key = %(key)s and s.token = %(token)s and not {held} returning s.key
), noted as (
    insert into {schema}.audit (at, by, role, what, target)
    select clock_timestamp(), %(by)s, session_user, 'release', 'request ' || left(encode(key, 'hex'), 12) from gone
)
delete from {schema}.record where key in (select key from gone) and state = {PROCESSING} returning key
