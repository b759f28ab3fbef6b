-- Upkeep: deletes what is not needed any more. queries.py describes the format: {schema} is the configured schema,
-- {COMPLETED} the number stored for that state.

-- name: begin_pass
-- R27: if no pass is running, and with `every` only when one is due. Of two that begin at once the second gets no row.
update {schema}.upkeep as u
set by = %(by)s, begun_at = clock_timestamp(), until = clock_timestamp() + make_interval(secs => %(lease)s)
from (
    select what from {schema}.upkeep
    where what = 'records' and (until <= clock_timestamp() or by is null and %(every)s::float8 is null)
    for update skip locked
) as free
where u.what = free.what
returning u.what

-- name: unpruned
-- Since when there was no pass, if that is `unpruned` seconds, and there are records. Web processes do not prune.
select since from (
    select coalesce((select ended_at from {schema}.upkeep where what = 'records'),
        (select min(applied_at) from {schema}.migration)) as since
) as last
where since < clock_timestamp() - make_interval(secs => %(unpruned)s) and exists (select from {schema}.record)

-- name: hold_pass
-- First in each transaction of a pass: a pruner that was silent for too long finds another's name, and stops.
update {schema}.upkeep set until = clock_timestamp() + make_interval(secs => %(lease)s)
where what = 'records' and by = %(by)s
returning what

-- name: end_pass
-- The next pass is due after `every`.
update {schema}.upkeep
set by = null, ended_at = clock_timestamp(),
    until = clock_timestamp() + make_interval(secs => coalesce(%(every)s::float8, 0))
where what = 'records' and by = %(by)s

-- name: leave_pass
-- Due at once, for the next pruner: the pass was not finished.
update {schema}.upkeep set by = null, until = clock_timestamp() where what = 'records' and by = %(by)s

-- name: in_a_range
-- If a crash undoes a prune, records are only kept for longer, so it waits for no disk (R29). By indexes, however few
-- rows the statistics report.
set local synchronous_commit = off; set local enable_seqscan = off

-- fragment: all_ranges
-- The ranges of blocks of `record`, and what is known of them.
generate_series(0, pg_relation_size('{schema}.record') / current_setting('block_size')::bigint - 1, %(blocks)s) as g (low)
left join {schema}.upkeep_range as k on k.low = g.low and k.filenode = pg_relation_filenode('{schema}.record')

-- name: ranges
-- R28: the ranges in which a record can have expired.
select g.low from {all_ranges}
where %(every)s::float8 is null or k.look_at is null or k.look_at <= clock_timestamp()
order by g.low

-- fragment: over
-- R11: final records that are past their scope's retention, or have expired (R37). A DEAD one waits for a person as
-- long as it has a dead letter, or a saga.
coalesce(r.expires_at, r.changed_at + s.retain) < clock_timestamp() and (
    r.state in ({COMPLETED}, {FAILED})
    or r.state = {DEAD} and not exists (select from {schema}.dead_letter as d where d.key = r.key)
       and not exists (select from {schema}.saga as g where g.key = r.key))

-- name: prune_range
-- The kept records determine when the range is read again (R28). A record that is added meanwhile expires after the
-- shortest `retain` at the earliest, or as soon as a kept one. A person's change (a shorter `retain`, a discarded dead
-- letter) waits for a day at most. The statement's time is used, which is before that of each row here: what expires
-- meanwhile is read again.
with gone as (
    delete from {schema}.record as r using {schema}.scope as s
    where r.ctid >= %(from)s::tid and r.ctid < %(to)s::tid and s.id = r.scope_id and {over}
    returning r.key
), gathered as (
    select array_agg(key order by key) as keys from gone
), results as (
    delete from {schema}.result where key = any((select keys from gathered)::bytea[])
), histories as (
    delete from {schema}.history where key = any((select keys from gathered)::bytea[])
), signals as (
    delete from {schema}.signal where key = any((select keys from gathered)::bytea[])
), children as (
    delete from {schema}.child where parent = any((select keys from gathered)::bytea[])
), steps as (
    delete from {schema}.step where key = any((select keys from gathered)::bytea[])
), acceptances as (
    delete from {schema}.accepted where key = any((select keys from gathered)::bytea[])
), kept as (
    select r.scope_id,
        min(coalesce(r.expires_at, r.changed_at + s.retain)) filter (
            where r.state >= {COMPLETED}
              and coalesce(r.expires_at, r.changed_at + s.retain) >= statement_timestamp()) as expires,
        min(r.expires_at - r.changed_at) as lives
    from {schema}.record as r join {schema}.scope as s on s.id = r.scope_id
    where r.ctid >= %(from)s::tid and r.ctid < %(to)s::tid
    group by r.scope_id
), seen as (
    update {schema}.scope set seen_at = clock_timestamp(), retired_at = null where id in (
        select s.id from {schema}.scope as s join kept on kept.scope_id = s.id
        where s.seen_at < clock_timestamp() - interval '12 hours' or s.retired_at is not null
        order by s.id for update of s skip locked
    )
), noted as (
    insert into {schema}.upkeep_range (low, filenode, looked_at, look_at)
    select %(low)s, pg_relation_filenode('{schema}.record'), statement_timestamp(), least((select min(expires) from kept),
        statement_timestamp() + (select min(lives) from kept),
        statement_timestamp() + (select min(retain) from {schema}.scope), statement_timestamp() + interval '1 day')
    on conflict (low) do update
    set filenode = excluded.filenode, looked_at = excluded.looked_at, look_at = excluded.look_at
)
select count(*) from gone

-- name: prunable
select count(*) from {schema}.record as r join {schema}.scope as s on s.id = r.scope_id
where r.ctid >= %(from)s::tid and r.ctid < %(to)s::tid and {over}

-- name: keep_letters
-- O5: the limits that the handlers of this worker have.
insert into {schema}.dead_retention (app, handler, letters, bodies)
select w.app, w.name, make_interval(secs => w.letters), make_interval(secs => w.bodies)
from unnest(%(apps)s::text[], %(names)s::text[], %(letters)s::float8[], %(bodies)s::float8[])
    as w (app, name, letters, bodies)
on conflict (app, handler) do update set letters = excluded.letters, bodies = excluded.bodies
where (dead_retention.letters, dead_retention.bodies) is distinct from (excluded.letters, excluded.bodies)

-- fragment: aged
-- A dead letter of handler `k` that is not needed: not one of a saga that waits for a person.
d.handler = k.handler and starts_with(d.scope, k.app || '/')
and not exists (select from {schema}.saga as g where g.key = d.key)

-- name: prune_letters
-- O5: up to the limit for each handler that has one, by the index on their time. The age of a redriven one counts from
-- the redrive.
with gone as (
    delete from {schema}.dead_letter where id in (
        select old.id from {schema}.dead_retention as k cross join lateral (
            select d.id from {schema}.dead_letter as d
            where d.last_at < (select clock_timestamp()) - k.letters
              and coalesce(d.redriven_at, d.last_at) < (select clock_timestamp()) - k.letters and {aged}
            order by d.last_at limit %(limit)s for update skip locked
        ) as old where k.letters is not null
    )
    returning id
), traces as (
    delete from {schema}.redrive where letter in (select id from gone)
)
select count(*) from gone

-- name: empty_letters
-- The text of an exception may quote the message; its type and its place do not.
with emptied as (
    update {schema}.dead_letter as l
    set body_size = coalesce(body_size, length(body)), body_sha256 = '', body = '', headers = '\x7b7d', delivered = null,
        emptied_at = clock_timestamp(),
        error = coalesce({schema}.error_type(error) || ' (' || {schema}.error_place(error) || ')', error)
    where id in (
        select old.id from {schema}.dead_retention as k cross join lateral (
            select d.id from {schema}.dead_letter as d
            where d.emptied_at is null and d.last_at < (select clock_timestamp()) - k.bodies
              and coalesce(d.redriven_at, d.last_at) < (select clock_timestamp()) - k.bodies and {aged}
            order by d.last_at limit %(limit)s for update skip locked
        ) as old where k.bodies is not null
    )
    returning id
)
select count(*) from emptied

-- name: prune_deliveries
-- O22: rows of the delivery log, up to the limit, by the index on their end.
with gone as (
    delete from {schema}.delivery_log where ctid = any(array(
        select ctid from {schema}.delivery_log where until < (select clock_timestamp()) order by until limit %(limit)s
    ))
    returning until
)
select count(*) from gone

-- name: check_low_water
-- P9, the full check, once an hour: everything before a low water is read. There can be a message only if its row was
-- written without the triggers of the tables. A queue that has a low water of its own, and no message, does not need it
-- any more.
with old as materialized (
    select m.line, m.name, m.id, case m.line
        when 'queue' then exists (
            select from {schema}.queue as q where q.name = m.name and coalesce(q.moved, q.id) < m.low)
            or m.name = '' and exists (select from {schema}.of_all as u where u.line = 'queue' and u.id < m.low)
        when 'delayed' then exists (
            select from {schema}.delayed as d where d.name = m.name and d.due_at < to_timestamp(m.low / 1e6))
        when 'outbox' then exists (
            select from {schema}.outbox as o
            where o.destination = m.name and o.id < m.low and o.due_at is null and o.parked_at is null)
            or m.name = '' and exists (select from {schema}.of_all as u where u.line = 'outbox' and u.id < m.low)
        else exists (
            select from {schema}.outbox as o
            where o.due_at < to_timestamp(m.low / 1e6) and o.due_at is not null and o.parked_at is null)
        end as passed, m.name <> '' and case m.line
        when 'queue' then not exists (
            select from {schema}.queue as q where q.name = m.name and coalesce(q.moved, q.id) >= m.low)
        when 'outbox' then not exists (
            select from {schema}.outbox as o
            where o.destination = m.name and o.id >= m.low and o.due_at is null and o.parked_at is null
        ) and not exists (
            select from {schema}.outbox as o
            where o.destination = m.name and o.tries > 0 and o.due_at is not null and o.parked_at is null)
        else false end as idle
    from {schema}.low_water as m where m.looked_at < clock_timestamp() - interval '1 hour'
), gone as (
    delete from {schema}.low_water as m using old
    where (old.passed or old.idle) and (m.line, m.name, m.id) = (old.line, old.name, old.id) returning old.passed
), seen as (
    update {schema}.low_water as m set looked_at = clock_timestamp() from old
    where not old.passed and not old.idle and (m.line, m.name, m.id) = (old.line, old.name, old.id)
)
select count(*) filter (where passed) from gone

-- name: prune_attempts
-- Leftovers: another worker applied the message, or it is gone from the broker. PENDING records still need theirs.
-- A scope may be pruned while an attempt of it is being written.
delete from {schema}.attempt as a
where a.changed_at < clock_timestamp()
        - coalesce((select s.retain from {schema}.scope as s where s.id = a.scope_id), interval '14 days')
  and not exists (select from {schema}.record as r where r.key = a.key and r.state = {PENDING})

-- name: prune_signals
-- L43: of sagas that never began. Those of a saga that has begun are deleted with its record.
delete from {schema}.signal as g using {schema}.scope as s
where s.id = g.scope_id and g.sent_at < clock_timestamp() - s.retain
  and not exists (select from {schema}.record as r where r.key = g.key)

-- name: prune_requests
-- H24: no client has retried them within `retain`. A request that a rival is just taking is locked by it.
with gone as (
    delete from {schema}.request where key in (
        select s.key from {schema}.request as s
        where s.started_at < clock_timestamp()
                - coalesce((select c.retain from {schema}.scope as c where c.id = s.scope_id), interval '14 days')
          and not {held}
        for update skip locked
    )
    returning key
)
delete from {schema}.record where key in (select key from gone) and state = {PROCESSING}

-- name: retire_scopes
-- R30. A claim revives a retired scope, and so does a record that a pass sees.
update {schema}.scope set retired_at = clock_timestamp()
where id in (
    select id from {schema}.scope
    where retired_at is null and seen_at < clock_timestamp() - interval '2 days'
    order by id limit 10000 for update skip locked
)

-- name: prune_scopes
-- R30. Each range was read each day since then, and the transactions that had used the scope before are long over.
delete from {schema}.scope where id in (
    select s.id from {schema}.scope as s
    where s.retired_at < clock_timestamp() - interval '30 days'
      and s.retired_at + interval '29 days' < (
          select coalesce(min(coalesce(k.looked_at, '-infinity')), clock_timestamp()) from {all_ranges})
      and not exists (select from {schema}.attempt as a where a.scope_id = s.id)
      and not exists (select from {schema}.saga as a where a.scope_id = s.id)
      and not exists (select from {schema}.signal as a where a.scope_id = s.id)
      and not exists (select from {schema}.request as a where a.scope_id = s.id)
    order by s.id limit 10000 for update skip locked
)
