-- Sagas that wait (L40 to L43). {schema} is the configured schema.

-- A step that waits: until when, and for a signal of which name; without one it sleeps. While it waits it has no position.
-- Its kind and its state are those of a finished transaction: a worker of an earlier version finds a recorded step that
-- its handler does not request, and leaves the saga to a newer one (L29).
alter table {schema}.step add column until timestamptz, add column signal text;

-- The names of the signals that make a saga due which waits, and which nobody holds.
alter table {schema}.saga add column signals text[];

-- Signals that no wait has taken yet. `id` is their order.
create table {schema}.signal (
    key           bytea not null,                -- of the saga, which need not have begun
    name          text not null,
    id            bigint generated always as identity,
    scope_id      integer not null,
    body          bytea,                         -- null: a signal without a payload
    content_type  text,
    sent_at       timestamptz not null,
    primary key (key, name, id)
);

-- Begins a wait, or looks whether one that was begun is over (L40): by the oldest signal of its name, which is taken with
-- it, or else by its end, which was computed once. No row: fenced, or it was over already. While it waits, `position` is
-- null and `left_s` the seconds until its end.
create function {schema}.await_step(key bytea, token bigint, worker bigint, phase smallint, name text,
    seconds double precision, signal text, overlapped boolean, timed_out bytea, timed_out_type text)
returns table (state smallint, overlapped_now boolean, "position" bigint, output bytea, content_type text,
    left_s double precision)
language plpgsql set enable_seqscan = off as $$
#variable_conflict use_column
declare
    began {schema}.step;
    given {schema}.signal;
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
    delete from {schema}.signal as g
    where g.key = began.key and g.name = began.signal and g.id = (
        -- FOR UPDATE, so that a wait of another branch goes on to the next signal, and does not end without one.
        select o.id from {schema}.signal as o where o.key = began.key and o.name = began.signal order by o.id limit 1
        for update)
    returning * into given;
    if given.id is not null or began.until <= clock_timestamp() then
        update {schema}.step as s
        set state = case when given.id is null and began.signal is not null then 3 else 2 end, token = await_step.token,
            position = nextval('{schema}.saga_token'), finished_at = clock_timestamp(),
            output = case when given.id is not null then given.body
                          when began.signal is not null then await_step.timed_out end,
            content_type = case when given.id is not null then given.content_type
                                when began.signal is not null then await_step.timed_out_type end
        where s.key = began.key and s.name = began.name
        returning * into began;
    end if;
    return query select began.state, began.overlapped, began.position, began.output, began.content_type,
        greatest(0, extract(epoch from began.until - clock_timestamp()))::double precision;
end
$$;

-- At the COMMIT of whoever sent a signal, so that nobody waits for the rest of that transaction.
create function {schema}.wake() returns trigger language plpgsql set enable_seqscan = off as $$
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

-- The key under which a saga is stored, and the name of its scope (R10): as `message/keys.py` has them.
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
-- stored. READ COMMITTED, since `wake` has to see a saga that began to wait while this transaction ran (L42).
create function {schema}.send_signal(key bytea, scope text, name text, body bytea, content_type text)
returns text language plpgsql set enable_seqscan = off as $$
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

create function {schema}.signal(
    app text, handler text, key text, name text, payload jsonb default null, tenant text default null
)
returns text language plpgsql as $$
begin
    if app is null or handler is null or coalesce(signal.key, '') = '' then
        raise exception 'a signal needs the app, the handler and the key of its saga' using errcode = '22023';
    end if;
    return {schema}.send_signal({schema}.saga_key(app, handler, signal.key, tenant),
        {schema}.saga_scope(app, handler, tenant), signal.name, convert_to(payload::text, 'UTF8'),
        case when payload is not null then 'application/json' end);
end
$$;
