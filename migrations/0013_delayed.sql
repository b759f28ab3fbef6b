-- Messages of the Postgres queue that are not due yet (P7). {schema} is the configured schema.
--
-- A table of its own: what waits for days is not walked over by those who take from the queue, and workers of earlier
-- versions, which know only the queue, find nothing in it that is not due.
create table {schema}.delayed (
    id          bigint generated always as identity primary key,
    name        text not null,
    message_id  text,
    body        bytea not null,
    headers     bytea not null default '\x7b7d',
    due_at      timestamptz not null
);

create index delayed_due on {schema}.delayed (name, due_at);

-- As those in 0001, with a delay; calls without one mean these now. The old ones stay under other names, since views and
-- functions of the user's may depend on them.
alter function {schema}.publish(text, jsonb, text, jsonb) rename to publish_undelayed;
alter function {schema}.publish_bytes(text, bytea, text, jsonb) rename to publish_bytes_undelayed;

create function {schema}.publish_bytes(
    queue text, payload bytea, key text default null, headers jsonb default '{{}}', delay interval default null
)
returns bigint language plpgsql as $$
declare
    new_id bigint;
begin
    if jsonb_typeof(coalesce(publish_bytes.headers, '{{}}')) <> 'object' then
        raise exception 'headers must be a JSON object of texts, e.g. {{"n": "v"}}' using errcode = '22023';
    end if;
    if delay > interval '0' then
        insert into {schema}.delayed (name, message_id, body, headers, due_at)
        values (queue, key, payload, convert_to(coalesce(publish_bytes.headers, '{{}}')::text, 'UTF8'),
                clock_timestamp() + delay)
        returning id into new_id;
        return new_id;
    end if;
    insert into {schema}.queue (name, message_id, body, headers)
    values (queue, key, payload, convert_to(coalesce(publish_bytes.headers, '{{}}')::text, 'UTF8'))
    returning id into new_id;
    perform pg_notify('idemconsumer_queue', queue);
    return new_id;
end
$$;

create function {schema}.publish(
    queue text, payload jsonb, key text default null, headers jsonb default '{{}}', delay interval default null
)
returns bigint language sql as $$
    select {schema}.publish_bytes(queue, convert_to(payload::text, 'UTF8'), key, headers, delay)
$$;

-- Whoever may call the old ones, and nobody else, may call these.
do $$
declare
    each record;
    may aclitem;
begin
    for each in
        select p.proacl, f.made from (values
            ('{schema}.publish_undelayed(text, jsonb, text, jsonb)'::regprocedure,
             '{schema}.publish(text, jsonb, text, jsonb, interval)'),
            ('{schema}.publish_bytes_undelayed(text, bytea, text, jsonb)'::regprocedure,
             '{schema}.publish_bytes(text, bytea, text, jsonb, interval)')
        ) as f (old, made) join pg_proc as p on p.oid = f.old
        where p.proacl is not null
    loop
        execute format('revoke execute on function %s from public', each.made);
        foreach may in array each.proacl loop
            execute format('grant execute on function %s to %s', each.made, (
                select case when e.grantee = 0 then 'public' else quote_ident(pg_get_userbyid(e.grantee)) end
                from aclexplode(array[may]) as e
            ));
        end loop;
    end loop;
end
$$;
