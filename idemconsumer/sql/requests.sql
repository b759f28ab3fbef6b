-- Requests in leased mode: a claim that is committed first, and ended by whoever has its token. queries.py describes the
-- format: {schema} is the configured schema, {PROCESSING} the number stored for that state, {held} a fragment of sagas.sql.

-- name: claim_request
-- H20. The record and the row in one commit, under the lock and the index of every claim (J1, R3). As `begin_sagas`, one
-- row: with our token, or with what was found, and then with the row's token if nobody has a good lease for it. The lease
-- is looked at here, by the server's clock: nothing is held under one that is over.
with alive as materialized (
    select id from {schema}.worker where id = %(worker)s and until > clock_timestamp()
), missed as materialized (
    select m.* from alive cross join lateral {schema}.claim(array[%(key)s::bytea], array[%(scope)s::integer],
        array[%(fingerprint)s::bytea], array[%(canonical)s::bytea], array[%(expires)s::float8], {PROCESSING}::smallint,
        false) as m
), begun as (
    insert into {schema}.request (key, scope_id, token, worker, started_at)
    select %(key)s, %(scope)s, nextval('{schema}.saga_token'), alive.id, clock_timestamp()
    from alive where not exists (select from missed)
    returning token
)
select m.key, m.found, m.fingerprint, m.body, m.content_type, m.canonical, m.status, m.headers, null::bigint as token,
    case when s.worker = %(worker)s or not {held} then s.token end as free
from missed as m left join {schema}.request as s on s.key = m.key
union all
select %(key)s::bytea, null, null, null, null, null, null, null, token, null from begun

-- name: take_request
-- H22. By the token that was seen to be free: of two who take it, the second finds another one. One that is ours already
-- was claimed with an answer that never came, so nothing has run under it (H23). Worker 0 is nobody. With when
-- the former owner began: what it may have done is as old.
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

-- fragment: completed
-- H21: the row is locked by its token first, so a former owner finds none, and writes nothing. When it expires is moved
-- along by a trigger (R37). With `lost` only while nobody has a good lease for it (H36).
fenced as materialized (
    select s.key from {schema}.request as s
    where s.key = %(key)s and s.token = %(token)s and not (%(lost)s and {held}) for update
), ended as (
    update {schema}.record set state = %(state)s, changed_at = clock_timestamp()
    where key = (select key from fenced)
), stored as (
    insert into {schema}.result (key, body, content_type, status, headers)
    select key, %(result)s::bytea, %(content_type)s::text, %(status)s::smallint, %(sent)s::bytea from fenced
)

-- name: complete_request
with {completed}
delete from {schema}.request where key = (select key from fenced) returning key

-- name: settle_lost_request
-- H36, O16.
with {completed}, noted as (
    insert into {schema}.audit (at, by, role, what, target)
    select clock_timestamp(), %(by)s, session_user, 'settle', 'request ' || left(encode(key, 'hex'), 12) from fenced
)
delete from {schema}.request where key = (select key from fenced) returning key

-- name: drop_request
-- Behind `lock_key`: a claim of the key that is being made, ours or a rival's, is decided then. Without a token: whatever
-- this worker has of it (H23). Where a former owner was lost, or this one `ran` and nobody knows how far, that is still to
-- be told to the next one, and since when: nobody has it then.
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
-- Of all tenants of a route together; at most `most` rows are read.
select split_part(c.name, '/', 1) as app, split_part(c.name, '/', 3) as route, count(*) filter (where s.held) as running,
    count(*) filter (where not s.held) as lost, min(s.started_at) as oldest,
    sum(count(*)) over () > %(most)s as more
from (select s.scope_id, s.started_at, {held} as held from {schema}.request as s limit %(most)s + 1) as s
join {schema}.scope as c on c.id = s.scope_id
where %(scopes)s::text is null or starts_with(c.name, %(scopes)s)
group by 1, 2 order by 1, 2

-- name: abandoned_requests
-- H24. Of each handler, up to `most` of them: nobody has a good lease for them, and nobody has come back.
select c.name as scope, count(*) as requests, min(s.started_at) as oldest
from (select * from {schema}.request as s where not {held} order by s.started_at limit %(most)s + 1) as s
join {schema}.scope as c on c.id = s.scope_id
group by 1 order by 1

-- name: lost_requests
-- H36. All of them: a process that is gone has left as many as it ran.
select s.key, c.name, (extract(epoch from s.started_at) * 1000000)::bigint, s.token
from {schema}.request as s join {schema}.scope as c on c.id = s.scope_id
where not {held} order by s.started_at

-- name: release_lost_request
-- H36. Behind `lock_key`. By the token that was seen: one that was taken since, and lost again, is another one.
with gone as (
    delete from {schema}.request as s where s.key = %(key)s and s.token = %(token)s and not {held} returning s.key
), noted as (
    insert into {schema}.audit (at, by, role, what, target)
    select clock_timestamp(), %(by)s, session_user, 'release', 'request ' || left(encode(key, 'hex'), 12) from gone
)
delete from {schema}.record where key in (select key from gone) and state = {PROCESSING} returning key
