-- Sagas: leases, fencing tokens, steps, waits, signals, children, schedules. {schema} is the configured schema.

create table {schema}.worker (
    id      bigint generated always as identity primary key,
    name    text not null,
    lease   interval not null,
    until   timestamptz not null,
    runs    jsonb not null,
    build   text
);

comment on table {schema}.worker is
    'Leases: one row a process, renewed by a thread of its own. What it holds is stale when its lease is over';
comment on column {schema}.worker.name is 'Host and pid, for people';
comment on column {schema}.worker.runs is
    'The handlers of sagas that it runs (L28): JSON list of objects with app, handler and version';
comment on column {schema}.worker.build is
    'Which code it runs (L29); null: no saga is to be left to it, since it takes none by itself';

create sequence {schema}.saga_token;

create table {schema}.saga (
    key         bytea primary key,
    scope_id    integer not null,
    handler     text not null,
    state       smallint not null,
    token       bigint not null,
    worker      bigint,
    due         timestamptz not null,
    attempt     integer not null,
    parked      text,
    version     text,
    rejection   bytea,
    error       text,
    source      text not null,
    position    text not null,
    message_id  text,
    body        bytea not null,
    headers     bytea not null,
    started_at  timestamptz not null,
    stale       boolean not null default false,
    delivered   bytea,
    suspicion   smallint not null default 0,
    app         text,
    cancel      boolean,
    signals     text[],
    letter      bigint,
    parent      bytea,
    unable      text[]
);

-- `saga_due` is for people, and `saga_parked` for what waits for them. A saga that waits is in `saga_waiting`, a saga that is
-- held in `saga_held`, and one that is put aside in neither, so both are small (L32, L60).
create index saga_due on {schema}.saga (handler, due);
create index saga_waiting on {schema}.saga (handler, coalesce(version, ''), due)
    where worker is null and parked is null;
create index saga_held on {schema}.saga (worker, handler, due) where worker is not null;
create index saga_parked on {schema}.saga (handler) where parked is not null;

comment on table {schema}.saga is
    'A saga while it runs, waits for its next attempt, or waits for a person. Whoever writes for it first locks this row';
comment on column {schema}.saga.state is '1 processing, 2 undoing';
comment on column {schema}.saga.token is 'Fencing token, which grows with every owner';
comment on column {schema}.saga.worker is 'Who holds it; null: nobody, and it can be taken from `due` on';
comment on column {schema}.saga.attempt is 'Takeovers without a finished step in between';
comment on column {schema}.saga.parked is 'Why it waits for a person';
comment on column {schema}.saga.rejection is 'What FAILED will say, once all is undone';
comment on column {schema}.saga.stale is
    'It was taken from a worker that was lost, and what follows from that is not decided yet; outlives a release';
comment on column {schema}.saga.delivered is 'As in dead_letter';
comment on column {schema}.saga.suspicion is
    'Whether it may have killed workers (L22). 0: none has died. 1: one has, beside other sagas, since the last finished '
    'step. 2: so has the next one, and the saga runs while nothing else of its process does. 3: it does so now, and if '
    'that worker dies, it is an attempt of the saga';
comment on column {schema}.saga.app is
    'The app that it was moved to; null: the one that its scope names. Its scope stays, for the keys of its steps';
comment on column {schema}.saga.cancel is
    'Null: nobody has asked to cancel it, or that is decided by UNDOING (L50). True: its finished steps are to be undone';
comment on column {schema}.saga.signals is 'The names of the signals that make it due while it waits and nobody holds it';
comment on column {schema}.saga.letter is
    'The dead letter that it was redriven from, until it ends or is put aside again (O24)';
comment on column {schema}.saga.unable is
    'The builds whose handler does not request what is recorded (L29); null: none, or a person has resumed it since';
comment on column {schema}.saga.parent is
    'The saga whose start began it (L80); null: a message of another source did, or code';

create table {schema}.step (
    key           bytea not null,
    name          text not null,
    kind          smallint not null,
    state         smallint not null,
    has_undo      boolean not null,
    overlapped    boolean not null default false,
    position      bigint,
    token         bigint not null,
    attempt       integer not null default 1,
    output        bytea,
    content_type  text,
    started_at    timestamptz not null,
    finished_at   timestamptz,
    undo_at       timestamptz,
    undone_at     timestamptz,
    placed        boolean not null default false,
    until         timestamptz,
    signal        text,
    arguments     bytea,
    primary key (key, name)
) with (autovacuum_vacuum_scale_factor = 0.02, autovacuum_vacuum_threshold = 10000);

comment on table {schema}.step is 'Kept until the record is pruned, so that a finished saga can still be looked at';
comment on column {schema}.step.kind is '1 tx, or a wait; 2 call';
comment on column {schema}.step.state is '1 intent, 2 done, 3 rejected, 4 undo intent, 5 undone';
comment on column {schema}.step.overlapped is 'Another step ran at the same time, so its place among them is not fixed';
comment on column {schema}.step.position is 'Order of finishing; null: it has not finished, or waits';
comment on column {schema}.step.token is 'Of the owner that wrote it last';
comment on column {schema}.step.undo_at is 'When its undo began; an undo has times of its own, so that those of the step stay';
comment on column {schema}.step.placed is
    'A call that the handler''s own task began, with no step beside it, so that it has a fixed place among them (L24)';
comment on column {schema}.step.until is 'Until when it waits; null: it is no wait (L40)';
comment on column {schema}.step.signal is
    'The name of the signal that it waits for, or child: and the key of a child; null: it sleeps';
comment on column {schema}.step.arguments is
    'Eight bytes of a hash of each of its arguments, zeros for what cannot be compared; null: a replay may have others (L73)';

-- The guard for steps: a COMMIT inside a step's function finds no seal, so the effect cannot outlive its checkpoint.
create constraint trigger sealed after insert or update on {schema}.step
    deferrable initially deferred for each row
    execute function {schema}.guard();

-- A saga's transaction step begins and ends in one round trip each, with BEGIN and with COMMIT.
--
-- Functions, so that their plans are kept: both are sent as text. Planned while a table is empty they would read all of it
-- for ever, but for enable_seqscan (G5).

-- Marks the transaction, locks the saga's row and inserts the step, before the step's own first statement. The lock is
-- held to COMMIT (L2); waiting for it may find the row changed, and then its new version is what is asked. The checkpoint
-- comes first, so that a COMMIT inside the step fails at the guard (L3). Null: the saga has another owner or another
-- phase. 0: the step has come to its end already. Else its attempt.
create function {schema}.begin_step(mark text, lock_timeout text, key bytea, token bigint, worker bigint, phase smallint,
    name text, kind smallint, state smallint, has_undo boolean, arguments bytea)
returns integer language plpgsql set enable_seqscan = off as $$
#variable_conflict use_column
declare
    begun integer;
begin
    perform set_config('idemconsumer.open', mark, true), set_config('lock_timeout', begin_step.lock_timeout, true);
    perform 1 from {schema}.saga as s
    where s.key = begin_step.key and s.token = begin_step.token and s.worker = begin_step.worker
      and s.state = begin_step.phase
    for share;
    if not found then
        return null;
    end if;
    insert into {schema}.step (key, name, kind, state, has_undo, token, started_at, arguments)
    values (begin_step.key, begin_step.name, begin_step.kind, begin_step.state, begin_step.has_undo, begin_step.token,
        clock_timestamp(), begin_step.arguments)
    on conflict (key, name) do update
    set state = excluded.state, token = excluded.token, attempt = step.attempt + 1,
        undo_at = case when excluded.state = 4 then coalesce(step.undo_at, excluded.started_at) end
    where (step.state, excluded.state) in ((1, 1), (2, 4), (4, 4))
    returning step.attempt into begun;
    return coalesce(begun, 0);
end
$$;

-- By the transaction that began the step, and sealed with it: its position. Backward (5) only the undo is noted.
create function {schema}.finish_step(mark text, key bytea, name text, state smallint, overlapped boolean, token bigint,
    output bytea, content_type text)
returns bigint language plpgsql set enable_seqscan = off as $$
declare
    place bigint;
begin
    update {schema}.step as s
    set state = finish_step.state, overlapped = s.overlapped or finish_step.overlapped, token = finish_step.token,
        position = coalesce(s.position, nextval('{schema}.saga_token')),
        output = coalesce(s.output, finish_step.output),
        content_type = coalesce(s.content_type, finish_step.content_type),
        finished_at = coalesce(s.finished_at, clock_timestamp()),
        undone_at = case when finish_step.state = 5 then clock_timestamp() end
    where s.key = finish_step.key and s.name = finish_step.name
    returning s.position into place;
    perform {schema}.seal(mark);
    return place;
end
$$;

-- Written with what it tells; a saga that goes through undisturbed has no row here. Pruned with the steps.
create table {schema}.history (
    id       bigint generated always as identity,
    key      bytea not null,
    at       timestamptz not null,
    what     text not null,
    owner    text,
    token    bigint,
    attempt  integer,
    detail   text,
    primary key (key, id)
) with (autovacuum_vacuum_scale_factor = 0.02, autovacuum_vacuum_threshold = 10000);

comment on table {schema}.history is 'What happened to sagas besides their steps, for people';
comment on column {schema}.history.what is
    'redelivered, lost, taken, retaken, alone, held, released, reconciled, undoing, parked, resumed, abandoned …';
comment on column {schema}.history.owner is 'The worker that it is about, as its row said then';

create table {schema}.signal (
    key           bytea not null,
    name          text not null,
    id            bigint generated always as identity,
    scope_id      integer not null,
    body          bytea,
    content_type  text,
    sent_at       timestamptz not null,
    primary key (key, name, id)
);

comment on table {schema}.signal is 'Signals that no wait has taken yet';
comment on column {schema}.signal.key is 'Of the saga, which need not have begun';
comment on column {schema}.signal.id is 'Their order';
comment on column {schema}.signal.body is 'Null: it has no payload';

-- At the COMMIT of whoever sent a signal, so that nobody waits for the rest of that transaction. With the rights of its
-- owner, since a sender need not be able to read sagas: it looks whether one waits. Before Postgres 18 a deferred trigger
-- runs as the role that commits.
create function {schema}.wake() returns trigger language plpgsql security definer
    set enable_seqscan = off set search_path = pg_catalog, pg_temp as $$
begin
    perform pg_advisory_xact_lock_shared(('x' || encode(substring(new.key from 9 for 8), 'hex'))::bit(64)::bigint);
    update {schema}.saga as s set due = clock_timestamp()
    where s.key = new.key and s.worker is null and s.parked is null and new.name = any (s.signals)
      and s.due > clock_timestamp();
    if found then
        perform pg_notify('idemconsumer_queue', 'saga:');
    end if;
    return null;
end
$$;

create constraint trigger wake after insert on {schema}.signal
    deferrable initially deferred for each row execute function {schema}.wake();

-- The key under which a saga is stored, and the name of its scope (R10): as `message/keys.py` has them. With both, keys are
-- taken over from elsewhere (R31).
create function {schema}.saga_key(app text, handler text, key text, tenant text default null)
returns bytea language sql immutable as $$
    select sha256(string_agg(
        int4send(coalesce(octet_length(convert_to(part, 'UTF8')), -1)) || coalesce(convert_to(part, 'UTF8'), ''), ''::bytea
        order by n))
    from unnest(array[app, tenant, handler, key]) with ordinality as p (part, n)
$$;

create function {schema}.saga_scope(app text, handler text, tenant text default null)
returns text language sql immutable as $$
    select replace(replace(app, '%', '%25'), '/', '%2F') || '/'
        || case when tenant is null then '-' when tenant = '-' then '%2D'
                else replace(replace(tenant, '%', '%25'), '/', '%2F') end || '/'
        || replace(replace(handler, '%', '%25'), '/', '%2F')
$$;

-- Stores a signal with this transaction. `stored`; `early`, for a saga that has not begun; or `ended`, and then nothing is
-- stored. READ COMMITTED, since `wake` has to see a saga that began to wait while this transaction ran (L42). With the
-- rights of its owner, since it looks whether the saga has ended.
create function {schema}.send_signal(key bytea, scope text, name text, body bytea, content_type text)
returns text language plpgsql security definer
    set enable_seqscan = off set search_path = pg_catalog, pg_temp as $$
#variable_conflict use_column
declare
    phase smallint;
    id integer;
begin
    if current_setting('transaction_isolation') <> 'read committed' then
        raise exception 'a signal was sent in a transaction with isolation level %',
            current_setting('transaction_isolation')
            using errcode = '25001', hint = 'Send it in a READ COMMITTED transaction, or in one of its own.';
    end if;
    if coalesce(send_signal.name, '') = '' or length(send_signal.name) > 200 then
        raise exception 'the name of a signal is a text of 1 to 200 characters' using errcode = '22023';
    end if;
    select r.state into phase from {schema}.record as r where r.key = send_signal.key;
    if phase in (2, 3, 4) then
        return 'ended';
    end if;
    select c.id into id from {schema}.scope as c where c.name = send_signal.scope;
    if id is null then
        insert into {schema}.scope (name) values (send_signal.scope) on conflict (name) do update set name = excluded.name
        returning scope.id into id;
    end if;
    insert into {schema}.signal (key, name, scope_id, body, content_type, sent_at)
    values (send_signal.key, send_signal.name, id, send_signal.body, send_signal.content_type, clock_timestamp());
    return case when phase is null then 'early' else 'stored' end;
end
$$;

-- Refuses a handler that is not known, where that can be told (L81): of an app whose sagas workers have run in the last day,
-- but not this one's, and nothing is stored for it. Where nothing is known of the app, its first worker may be yet to come.
create function {schema}.check_saga(app text, handler text, tenant text)
returns void language plpgsql security definer
    set enable_seqscan = off set search_path = pg_catalog, pg_temp as $$
declare
    known text[];
    near text;
begin
    if exists (select from {schema}.scope as c where c.name = {schema}.saga_scope(app, handler, tenant)) then
        return;
    end if;
    known := array(select distinct r ->> 'handler' from {schema}.worker as w, jsonb_array_elements(w.runs) as r
                   where r ->> 'app' = app order by 1);
    if known = '{{}}' or handler = any (known) or exists (
        select from {schema}.scope as c
        where starts_with(c.name, split_part({schema}.saga_scope(app, ''), '/', 1) || '/')
          and split_part(c.name, '/', 3) = split_part({schema}.saga_scope('', handler), '/', 3)
    ) then
        return;
    end if;
    select k into near from unnest(known) as k
    cross join lateral (select 2.0 * count(*) / (length(k) + length(handler)) as alike
        from generate_series(1, length(k) - 1) as n where strpos(handler, substr(k, n, 2)) > 0) as a
    where a.alike > 0.5 order by a.alike desc, k limit 1;
    raise exception 'a signal for saga % of app %: no worker has run such a handler', quote_literal(handler),
        quote_literal(app)
        using errcode = '22023', hint = coalesce('Is it ' || quote_literal(near) || '? ',
            'Known are ' || array_to_string(known, ', ') || '. ') || 'For a new one, start a worker that runs it first.';
end
$$;

-- A signal that is named like the end of a child would make whoever waits for that child due again and again (L43).
create function {schema}.signal(
    app text, handler text, key text, name text, payload jsonb default null, tenant text default null
)
returns text language plpgsql as $$
begin
    if app is null or handler is null or coalesce(signal.key, '') = '' then
        raise exception 'a signal needs the app, the handler and the key of its saga' using errcode = '22023';
    end if;
    if starts_with(name, 'child:') then
        raise exception 'the signal % cannot be sent: such names are for the ends of child sagas', quote_literal(name)
            using errcode = '22023', hint = 'Give it, and its saga.wait, another name.';
    end if;
    perform {schema}.check_saga(app, handler, tenant);
    return {schema}.send_signal({schema}.saga_key(app, handler, signal.key, tenant),
        {schema}.saga_scope(app, handler, tenant), signal.name, convert_to(payload::text, 'UTF8'),
        case when payload is not null then 'application/json' end);
end
$$;

create table {schema}.child (
    parent        bytea not null,
    key           bytea not null,
    fingerprint   bytea,
    canonical     bytea,
    began         boolean not null default false,
    ended         boolean not null default false,
    state         smallint,
    body          bytea,
    content_type  text,
    primary key (parent, key)
);

create index child_key on {schema}.child (key);

comment on table {schema}.child is
    'What a saga has started, from the commit of that step on, and how it ended (L47 to L49): copied here in the commit of '
    'its end, since its record may be pruned before the parent looks. Kept until the parent''s record is pruned';
comment on column {schema}.child.fingerprint is 'Of the payload that it was started with; `canonical` too';
comment on column {schema}.child.began is
    'This start began it (L80): until it begins, since nothing was on record under its key; once it has ended, since '
    'saga.parent said so. In between that decides';
comment on column {schema}.child.state is '3 completed, 4 failed; null once it has ended: it had another payload';

-- Copies how a child has ended. Its record is final.
create function {schema}.copy_end(parent bytea, key bytea)
returns void language plpgsql set enable_seqscan = off as $$
begin
    update {schema}.child as c
    set ended = true, body = e.body, content_type = e.content_type,
        state = case when {schema}.same_payload(c.fingerprint, c.canonical, r.fingerprint, r.canonical) then r.state end
    from {schema}.record as r left join {schema}.result as e on e.key = r.key
    where c.parent = copy_end.parent and c.key = copy_end.key and r.key = c.key;
end
$$;

-- Whether a message waits in a handler's own queue under this key that no start of the saga `parent` has put there, nor one
-- that found that `parent` was the first.
create function {schema}.queued_by_others(queue text, given text, parent bytea)
returns boolean language sql set enable_seqscan = off as $$
    select exists (
        select from {schema}.queue as q where q.name = queued_by_others.queue and q.message_id = given
          and convert_from(q.headers, 'UTF8')::json ->> 'idemconsumer-parent' is distinct from encode(parent, 'hex'))
$$;

-- In the transaction of the step that starts a saga: from its commit on, whoever ends that saga finds this row. No claim
-- of the key is made meanwhile, and no saga under it ends, so that the end is either seen here or sees the row (L47).
-- Returns what is there under the key: its record, and what sagas have started under it that has not begun. `owner`: the one
-- of them that is the first (L80). `is_new`: nothing was there; with `queue`, also no message of another's.
create function {schema}.start_child(parent bytea, its {schema}.claim, queue text, given text)
returns table (state smallint, fingerprint bytea, canonical bytea, owner bytea, is_new boolean)
language plpgsql set enable_seqscan = off as $$
#variable_conflict use_column
declare
    recorded boolean;
    first bytea;
    added boolean;
begin
    perform pg_advisory_xact_lock(('x' || encode(substring(its.key for 8), 'hex'))::bit(64)::bigint);
    perform 1 from {schema}.saga as s where s.key = its.key for key share;
    recorded := exists (select from {schema}.record as r where r.key = its.key);
    select c.parent into first from {schema}.child as c
    where c.key = its.key and c.began and not c.ended and not recorded;
    insert into {schema}.child (parent, key, fingerprint, canonical, began)
    values (start_child.parent, its.key, its.fingerprint, its.canonical, first is null and not recorded)
    on conflict do nothing;
    added := found and first is null and not recorded
        and not {schema}.queued_by_others(start_child.queue, start_child.given, start_child.parent);
    perform {schema}.copy_end(r.parent, r.key) from (select start_child.parent, its.key) as r (parent, key)
    where exists (select from {schema}.record as f where f.key = r.key and f.state in (3, 4));
    first := coalesce(first, start_child.parent);
    return query
        select r.state, r.fingerprint, r.canonical, first, added from {schema}.record as r where r.key = its.key
        union all
        select 1::smallint, c.fingerprint, c.canonical, first, added from {schema}.child as c
        where c.parent in (start_child.parent, first) and c.key = its.key;
end
$$;

-- Whoever ends a saga, a person too, tells it to the sagas that have started it; in the order of their keys, so that two
-- who end several do not wait for each other. A saga that nobody has started costs this one look.
create function {schema}.saga_ended() returns trigger language plpgsql set enable_seqscan = off as $$
declare
    started record;
begin
    for started in
        select c.parent, c.key, (select e.parent from ended as e where e.key = c.key) as owner from {schema}.child as c
        where not c.ended and c.key = any(array(select e.key from ended as e))
        order by c.parent, c.key
    loop
        update {schema}.child as c set ended = true, began = c.parent is not distinct from started.owner
        where c.parent = started.parent and c.key = started.key;
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

-- Begins a wait, or looks whether one that was begun is over (L40): by the oldest signal of its name, which is taken with
-- it, by the end of a child (L48), or else by its end, which was computed once. What is recorded says which: `signal` is the
-- name of one, or the key of a child. No row: fenced, or it was over already. While it waits, `position` is null and
-- `left_s` the seconds until its end. When it is over, the waits of `closes` are gone (L74).
create function {schema}.await_step(key bytea, token bigint, worker bigint, phase smallint, name text,
    seconds double precision, signal text, overlapped boolean, closes text[], timed_out bytea, timed_out_type text,
    conflict bytea, conflict_type text)
returns table (state smallint, overlapped_now boolean, "position" bigint, output bytea, content_type text,
    left_s double precision)
language plpgsql set enable_seqscan = off as $$
#variable_conflict use_column
declare
    began {schema}.step;
    given {schema}.signal;
    its {schema}.child;
begin
    perform 1 from {schema}.saga as s
    where s.key = await_step.key and s.token = await_step.token and s.worker = await_step.worker
      and s.state = await_step.phase
    for share;
    if not found then
        return;
    end if;
    insert into {schema}.step (key, name, kind, state, has_undo, overlapped, token, started_at, until, signal)
    values (await_step.key, await_step.name, 1, 2, false, await_step.overlapped, await_step.token, clock_timestamp(),
        clock_timestamp() + make_interval(secs => await_step.seconds), await_step.signal)
    on conflict (key, name) do update set overlapped = step.overlapped or excluded.overlapped
    where step.position is null and step.until is not null
    returning * into began;
    if began.until is null then
        return;
    end if;
    if starts_with(began.signal, 'child:') then
        select * into its from {schema}.child as c
        where c.parent = began.key and 'child:' || encode(c.key, 'hex') = began.signal and c.ended;
    else
        delete from {schema}.signal as g
        where g.key = began.key and g.name = began.signal and g.id = (
            -- FOR UPDATE, so that a wait of another branch goes on to the next signal, and does not end without one.
            select o.id from {schema}.signal as o where o.key = began.key and o.name = began.signal order by o.id limit 1
            for update)
        returning * into given;
    end if;
    if given.id is not null or its.key is not null or began.until <= clock_timestamp() then
        update {schema}.step as s
        set state = case when given.id is not null or its.state = 3 or began.signal is null then 2 else 3 end,
            token = await_step.token, position = nextval('{schema}.saga_token'), finished_at = clock_timestamp(),
            output = case when given.id is not null then given.body
                          when its.state is not null then its.body
                          when its.key is not null then await_step.conflict
                          when began.signal is not null then await_step.timed_out end,
            content_type = case when given.id is not null then given.content_type
                                when its.state is not null then its.content_type
                                when its.key is not null then await_step.conflict_type
                                when began.signal is not null then await_step.timed_out_type end
        where s.key = began.key and s.name = began.name
        returning * into began;
        delete from {schema}.step as s where s.key = began.key and s.name = any (closes) and s.position is null;
    end if;
    return query select began.state, began.overlapped, began.position, began.output, began.content_type,
        greatest(0, extract(epoch from began.until - clock_timestamp()))::double precision;
end
$$;

-- Gives a saga up until one of its waits is over (L41), at no cost; the seconds until then. Null: fenced.
-- The lock is the one that `wake` and `tell_parent` take, so a signal, or the end of a child, is either seen here, or sees
-- that the saga waits (L42, L47). It comes before the row's, and each statement has a snapshot of its own.
-- With `child` its undo waits for the end of that one. `at_most`: the seconds until somebody has to look at it in any case
-- (L58).
create function {schema}.pause_saga(key bytea, token bigint, worker bigint, phase smallint, names text[], child bytea,
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
        due = case when s.cancel is null or pause_saga.child is not null
                   then least(w.due, clock_timestamp() + make_interval(secs => at_most))
                   else clock_timestamp() end  -- what is to be cancelled does not wait (L50)
    from (
        select min(case when t.position is not null
                          or exists (select from {schema}.signal as g where g.key = pause_saga.key and g.name = t.signal)
                          or starts_with(t.signal, 'child:') and exists (
                              select from {schema}.child as c
                              where c.parent = pause_saga.key and c.ended and 'child:' || encode(c.key, 'hex') = t.signal)
                        then clock_timestamp() else t.until end) as due,
            array_agg(t.signal) filter (where t.signal is not null) as signals
        from (
            select t.position, t.until, t.signal from {schema}.step as t
            where t.key = pause_saga.key and t.name = any (pause_saga.names)
            union all
            select null, clock_timestamp() + interval '100 years', 'child:' || encode(pause_saga.child, 'hex')
            where pause_saga.child is not null
        ) as t
    ) as w
    where s.key = pause_saga.key
    returning s.due into due;
    return extract(epoch from due - clock_timestamp());
end
$$;

-- For the undo of a start (L49): how the child has ended, 3 or 4; 1 if it has not; null: fenced. One that has not begun
-- never does: its record says that it was cancelled. 4 also for one that this saga has not begun, or that somebody else
-- waits to begin (L80).
create function {schema}.stop_child(key bytea, token bigint, worker bigint, phase smallint, child bytea, scope text,
    body bytea, content_type text, queue text, given text)
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
        return case when its.began then coalesce(its.state, 4::smallint) else 4 end;
    end if;
    select * into begun from {schema}.record as r where r.key = stop_child.child;
    if begun.key is not null then
        -- A saga that ends just now has no row any more: 1, and the next look finds how.
        return case when not exists (select from {schema}.saga as s
                                     where s.key = begun.key and s.parent is distinct from stop_child.key)
                     and {schema}.same_payload(its.fingerprint, its.canonical, begun.fingerprint, begun.canonical)
                    then 1 else 4 end;
    end if;
    if not its.began or {schema}.queued_by_others(stop_child.queue, stop_child.given, stop_child.key) then
        return 4;
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

-- A child whose message is put aside unread has ended (L66). In the commit of the dead letter, whoever writes it: there is
-- no record of such a message, and nobody runs it again, so those who have started the saga would wait for ever. Its record
-- says that it failed; nothing begins under its key any more. Under the lock of a claim (J1): what has begun, or begins
-- meanwhile under a message that can be read, is left alone.
create function {schema}.child_unread() returns trigger language plpgsql set enable_seqscan = off as $$
declare
    app text := substr(new.source, 11, greatest(0, length(new.source) - 11 - length(new.handler)));
    given text;
    tenant text;
    child bytea;
    id integer;
    started record;
begin
    if new.source <> 'postgres:~' || app || '/' || new.handler then
        return null;
    end if;
    begin
        given := convert_from(new.delivered, 'UTF8')::json ->> 'message_id';
        tenant := convert_from(new.headers, 'UTF8')::json ->> 'idemconsumer-tenant';
    exception when data_exception then  -- headers that cannot be a child's
        return null;
    end;
    child := {schema}.saga_key(app, new.handler, given, tenant);
    perform pg_advisory_xact_lock(('x' || encode(substring(child for 8), 'hex'))::bit(64)::bigint);
    if not exists (select from {schema}.child as c where c.key = child and not c.ended)
       or exists (select from {schema}.record as r where r.key = child) then
        return null;
    end if;
    insert into {schema}.scope (name) values ({schema}.saga_scope(app, new.handler, tenant))
    on conflict (name) do update set name = excluded.name
    returning scope.id into id;
    insert into {schema}.record (key, scope_id, state, changed_at) values (child, id, 4, clock_timestamp());
    insert into {schema}.result (key, body, content_type)
    values (child, convert_to(json_build_object('code', 'dead_letter', 'body',
        json_build_object('id', new.id, 'reason', new.reason, 'error', new.error))::text, 'UTF8'), 'application/json');
    for started in
        select c.parent from {schema}.child as c where c.key = child and not c.ended order by c.parent
    loop
        update {schema}.child as c set ended = true where c.parent = started.parent and c.key = child;
    end loop;
    return null;
end
$$;

create trigger child_unread after insert on {schema}.dead_letter
    for each row when (new.key is null and new.reason <> 'conflict' and starts_with(new.source, 'postgres:~'))
    execute function {schema}.child_unread();

-- As `redrive_letter`, of a letter whose saga waits for a person: it goes on where it stopped (O24). To the saga it does
-- what `sagas resume` does. Nothing is waited for: whoever holds the letter or the saga decides about it now. Returns what
-- became of it.
create function {schema}.redrive_saga(letter bigint, run text, by text)
returns text language plpgsql set enable_seqscan = off as $$
#variable_conflict use_column
declare
    its {schema}.dead_letter;
    held {schema}.saga;
begin
    select * into its from {schema}.dead_letter as d where d.id = redrive_saga.letter for update skip locked;
    if its.id is null then
        return 'busy';
    end if;
    if its.redriven_at is not null then
        return 'redriven';
    end if;
    select * into held from {schema}.saga as s where s.key = its.key for update skip locked;
    if held.key is null and exists (select from {schema}.saga as s where s.key = its.key) then
        return 'busy';
    end if;
    if held.key is null or held.parked is null then
        return 'decided';
    end if;
    insert into {schema}.history (key, at, what, detail)
    values (its.key, clock_timestamp(), 'resumed', 'letter ' || its.id || ' redriven by ' || redrive_saga.by);
    update {schema}.saga as s
    set token = greatest(s.token + 1, nextval('{schema}.saga_token')), parked = null, worker = null, stale = false,
        due = clock_timestamp(), attempt = 0, letter = its.id, unable = null
    where s.key = its.key;
    update {schema}.record as r set state = held.state, changed_at = clock_timestamp() where r.key = its.key;
    update {schema}.dead_letter as d set redriven_at = clock_timestamp() where d.key = its.key and d.redriven_at is null;
    insert into {schema}.redrive (letter, key, run, by, at, queued)
    values (its.id, its.key, redrive_saga.run, redrive_saga.by, clock_timestamp(), 0);
    return 'resumes';
end
$$;

-- What came of a redriven saga, in the commit that decides it, whichever worker or person does. For all other sagas these
-- are one condition each, and no call.
create constraint trigger redrive_ended after delete on {schema}.saga
    deferrable initially deferred for each row when (old.letter is not null)
    execute function {schema}.redrive_ended();

create function {schema}.saga_parked_again() returns trigger language plpgsql security definer
    set search_path = pg_catalog, pg_temp set enable_seqscan = off as $$
begin
    update {schema}.redrive as t set outcome = 'dead', ended_at = clock_timestamp()
    where t.key = old.key and t.outcome is null;
    new.letter := null;
    return new;
end
$$;

create trigger parked_again before update of parked on {schema}.saga
    for each row when (old.letter is not null and new.parked is not null)
    execute function {schema}.saga_parked_again();

-- Who may send a signal is said by a grant. The others are triggers, which fire without that right: with it, somebody could
-- have one of them fire for a table of their own.
revoke execute on function {schema}.send_signal(bytea, text, text, bytea, text), {schema}.check_saga(text, text, text),
    {schema}.wake(), {schema}.saga_parked_again() from public;

create table {schema}.schedule (
    app        text not null,
    name       text not null,
    rule       text not null,
    last       timestamptz not null,
    looked_at  timestamptz not null default clock_timestamp(),
    primary key (app, name, rule)
);

comment on table {schema}.schedule is 'Schedules that start sagas (L53). Another rule is another schedule, and begins anew';
comment on column {schema}.schedule.rule is 'Expression and time zone';
comment on column {schema}.schedule.last is 'The slots up to here have been started or left out';
comment on column {schema}.schedule.looked_at is
    'When a worker has last looked at it, to the day: one that nobody looks at any more is pruned';
