-- Sagas that other sagas have started (L47 to L49). {schema} is the configured schema.

-- What a saga has started, from the commit of that step on, and how it ended: copied here in the commit of its end, since
-- its record may be pruned before the one who started it looks. Kept until that one's record is pruned.
create table {schema}.child (
    parent        bytea not null,
    key           bytea not null,
    fingerprint   bytea,                         -- of the payload that it was started with
    canonical     bytea,
    ended         boolean not null default false,
    state         smallint,                      -- 3 completed 4 failed; null once it has ended: it had another payload
    body          bytea,
    content_type  text,
    primary key (parent, key)
);

create index child_running on {schema}.child (key) where not ended;

-- Copies how a child has ended. Its record is final.
create function {schema}.copy_end(parent bytea, key bytea)
returns void language plpgsql set enable_seqscan = off as $$
begin
    update {schema}.child as c
    set ended = true, body = e.body, content_type = e.content_type,
        state = case when (c.fingerprint is null or r.fingerprint is null or c.fingerprint = r.fingerprint
                           or c.canonical = r.canonical) is true then r.state end
    from {schema}.record as r left join {schema}.result as e on e.key = r.key
    where c.parent = copy_end.parent and c.key = copy_end.key and r.key = c.key;
end
$$;

-- In the transaction of the step that starts a saga: from its commit on, whoever ends that saga finds this row. No claim
-- of the key is made meanwhile, and no saga under it ends, so that the end is either seen here or sees the row (L47).
-- Returns what else was begun under the key: its record, and what this saga has started under it before.
create function {schema}.start_child(parent bytea, key bytea, fingerprint bytea, canonical bytea)
returns table (state smallint, fingerprint_found bytea, canonical_found bytea)
language plpgsql set enable_seqscan = off as $$
#variable_conflict use_column
begin
    perform pg_advisory_xact_lock(('x' || encode(substring(start_child.key for 8), 'hex'))::bit(64)::bigint);
    perform 1 from {schema}.saga as s where s.key = start_child.key for key share;
    insert into {schema}.child (parent, key, fingerprint, canonical)
    values (start_child.parent, start_child.key, start_child.fingerprint, start_child.canonical)
    on conflict do nothing;
    perform {schema}.copy_end(r.parent, r.key) from (select start_child.parent, start_child.key) as r (parent, key)
    where exists (select from {schema}.record as f where f.key = r.key and f.state in (3, 4));
    return query
        select r.state, r.fingerprint, r.canonical from {schema}.record as r where r.key = start_child.key
        union all
        select 1::smallint, c.fingerprint, c.canonical from {schema}.child as c
        where c.parent = start_child.parent and c.key = start_child.key;
end
$$;

-- Whoever ends a saga, a worker of an earlier version too, tells it to the sagas that have started it; in the order of
-- their keys, so that two who end several do not wait for each other. A saga that nobody has started costs this one look.
create function {schema}.saga_ended() returns trigger language plpgsql set enable_seqscan = off as $$
declare
    started record;
begin
    for started in
        select c.parent, c.key from {schema}.child as c
        where not c.ended and c.key = any(array(select e.key from ended as e))
        order by c.parent, c.key
    loop
        update {schema}.child as c set ended = true where c.parent = started.parent and c.key = started.key;
    end loop;
    return null;
end
$$;

create trigger ended after delete on {schema}.saga
    referencing old table as ended for each statement execute function {schema}.saga_ended();

-- At the COMMIT, when its result is there. Locks and wakes as `wake` does for a signal (L42).
create function {schema}.tell_parent() returns trigger language plpgsql set enable_seqscan = off as $$
begin
    perform {schema}.copy_end(new.parent, new.key);
    perform pg_advisory_xact_lock_shared(('x' || encode(substring(new.parent from 9 for 8), 'hex'))::bit(64)::bigint);
    update {schema}.saga as s set due = clock_timestamp()
    where s.key = new.parent and s.worker is null and s.parked is null
      and 'child:' || encode(new.key, 'hex') = any (s.signals) and s.due > clock_timestamp();
    if found then
        perform pg_notify('idemconsumer_queue', 'saga:');
    end if;
    return null;
end
$$;

create constraint trigger tell_parent after update of ended on {schema}.child
    deferrable initially deferred for each row when (new.ended and not old.ended)
    execute function {schema}.tell_parent();

-- As `await_step`, for the end of a child (L48). What is recorded says which: `signal` is its key.
create function {schema}.await_child(key bytea, token bigint, worker bigint, phase smallint, name text,
    seconds double precision, child bytea, overlapped boolean, timed_out bytea, timed_out_type text, conflict bytea,
    conflict_type text)
returns table (state smallint, overlapped_now boolean, "position" bigint, output bytea, content_type text,
    left_s double precision)
language plpgsql set enable_seqscan = off as $$
#variable_conflict use_column
declare
    began {schema}.step;
    its {schema}.child;
begin
    perform 1 from {schema}.saga as s
    where s.key = await_child.key and s.token = await_child.token and s.worker = await_child.worker
      and s.state = await_child.phase
    for share;
    if not found then
        return;
    end if;
    insert into {schema}.step (key, name, kind, state, has_undo, overlapped, token, started_at, until, signal)
    values (await_child.key, await_child.name, 1, 2, false, await_child.overlapped, await_child.token, clock_timestamp(),
        clock_timestamp() + make_interval(secs => await_child.seconds), 'child:' || encode(await_child.child, 'hex'))
    on conflict (key, name) do update set overlapped = step.overlapped or excluded.overlapped
    where step.position is null and step.until is not null
    returning * into began;
    if began.until is null then
        return;
    end if;
    select * into its from {schema}.child as c
    where c.parent = began.key and 'child:' || encode(c.key, 'hex') = began.signal and c.ended;
    if its.key is not null or began.until <= clock_timestamp() then
        update {schema}.step as s
        set state = case when its.state = 3 then 2 else 3 end, token = await_child.token,
            position = nextval('{schema}.saga_token'), finished_at = clock_timestamp(),
            output = case when its.key is null then await_child.timed_out
                          when its.state is null then await_child.conflict else its.body end,
            content_type = case when its.key is null then await_child.timed_out_type
                                when its.state is null then await_child.conflict_type else its.content_type end
        where s.key = began.key and s.name = began.name
        returning * into began;
    end if;
    return query select began.state, began.overlapped, began.position, began.output, began.content_type,
        greatest(0, extract(epoch from began.until - clock_timestamp()))::double precision;
end
$$;

-- Gives a saga up until one of its waits is over (L41), at no cost; the seconds until then. Null: fenced.
-- The lock is the one that `wake` and `tell_parent` take, so a signal, or the end of a child, is either seen here, or sees
-- that the saga waits (L42, L47). It comes before the row's, and each statement has a snapshot of its own.
-- `at_most`: the seconds until somebody has to look at it in any case (L58).
create function {schema}.pause_saga(key bytea, token bigint, worker bigint, phase smallint, names text[],
    at_most double precision)
returns double precision language plpgsql set enable_seqscan = off as $$
#variable_conflict use_column
declare
    due timestamptz;
begin
    perform pg_advisory_xact_lock(('x' || encode(substring(pause_saga.key from 9 for 8), 'hex'))::bit(64)::bigint);
    perform 1 from {schema}.saga as s
    where s.key = pause_saga.key and s.token = pause_saga.token and s.worker = pause_saga.worker
      and s.state = pause_saga.phase
    for update;
    if not found then
        return null;
    end if;
    update {schema}.saga as s
    set worker = null, stale = false, suspicion = 0, attempt = s.attempt - 1, signals = w.signals,
        due = case when s.cancel is null then least(w.due, clock_timestamp() + make_interval(secs => at_most))
                   else clock_timestamp() end  -- what is to be cancelled does not wait (L50)
    from (
        select min(case when t.position is not null
                          or exists (select from {schema}.signal as g where g.key = t.key and g.name = t.signal)
                          or starts_with(t.signal, 'child:') and exists (
                              select from {schema}.child as c
                              where c.parent = t.key and c.ended and 'child:' || encode(c.key, 'hex') = t.signal)
                        then clock_timestamp() else t.until end) as due,
            array_agg(t.signal) filter (where t.signal is not null) as signals
        from {schema}.step as t where t.key = pause_saga.key and t.name = any (pause_saga.names)
    ) as w
    where s.key = pause_saga.key
    returning s.due into due;
    return extract(epoch from due - clock_timestamp());
end
$$;

-- For the undo of a start (L49): how the child has ended, 3 or 4; 1 if it has not; null: fenced. One that has not begun
-- never does: its record says that it was cancelled. Nor is it ours if its key has begun with another payload.
create function {schema}.stop_child(key bytea, token bigint, worker bigint, phase smallint, child bytea, scope text,
    body bytea, content_type text)
returns smallint language plpgsql set enable_seqscan = off as $$
#variable_conflict use_column
declare
    its {schema}.child;
    begun {schema}.record;
    id integer;
begin
    perform 1 from {schema}.saga as s
    where s.key = stop_child.key and s.token = stop_child.token and s.worker = stop_child.worker
      and s.state = stop_child.phase
    for share;
    if not found then
        return null;
    end if;
    perform pg_advisory_xact_lock(('x' || encode(substring(stop_child.child for 8), 'hex'))::bit(64)::bigint);
    select * into its from {schema}.child as c where c.parent = stop_child.key and c.key = stop_child.child;
    if its.ended then
        return coalesce(its.state, 4::smallint);
    end if;
    select * into begun from {schema}.record as r where r.key = stop_child.child;
    if begun.key is not null then
        return case when (its.fingerprint is null or begun.fingerprint is null or its.fingerprint = begun.fingerprint
                          or its.canonical = begun.canonical) is true then 1 else 4 end;
    end if;
    insert into {schema}.scope (name) values (stop_child.scope) on conflict (name) do update set name = excluded.name
    returning scope.id into id;
    insert into {schema}.record (key, scope_id, state, fingerprint, canonical, changed_at)
    values (stop_child.child, id, 4, its.fingerprint, its.canonical, clock_timestamp());
    insert into {schema}.result (key, body, content_type)
    values (stop_child.child, stop_child.body, stop_child.content_type);
    perform {schema}.copy_end(stop_child.key, stop_child.child);
    return 4;
end
$$;

-- Gives up a saga whose undo waits for the end of a child, at no cost, as `pause_saga` does. Null: fenced.
create function {schema}.pause_undo(key bytea, token bigint, worker bigint, phase smallint, child bytea)
returns double precision language plpgsql set enable_seqscan = off as $$
#variable_conflict use_column
declare
    due timestamptz;
begin
    perform pg_advisory_xact_lock(('x' || encode(substring(pause_undo.key from 9 for 8), 'hex'))::bit(64)::bigint);
    perform 1 from {schema}.saga as s
    where s.key = pause_undo.key and s.token = pause_undo.token and s.worker = pause_undo.worker
      and s.state = pause_undo.phase
    for update;
    if not found then
        return null;
    end if;
    update {schema}.saga as s
    set worker = null, stale = false, suspicion = 0, attempt = s.attempt - 1,
        signals = array['child:' || encode(pause_undo.child, 'hex')],
        due = clock_timestamp() + case when exists (
            select from {schema}.child as c where c.parent = s.key and c.key = pause_undo.child and c.ended
        ) then interval '0' else interval '100 years' end
    where s.key = pause_undo.key
    returning s.due into due;
    return extract(epoch from due - clock_timestamp());
end
$$;
