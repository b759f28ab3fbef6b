-- Names that nobody would ever look at are refused (X1, L43). {schema} is the configured schema.

-- As in 0045. Kafka:orders was a queue of that name, which nobody reads.
create or replace function {schema}.publish_bytes(
    queue text, payload bytea, key text default null, headers jsonb default '{{}}', delay interval default null
)
returns bigint language plpgsql as $$
declare
    new_id bigint;
    into_queue text := queue;
    given jsonb := coalesce(publish_bytes.headers, '{{}}');
    due timestamptz;
begin
    if jsonb_typeof(given) <> 'object' then
        raise exception 'headers must be a JSON object of texts, e.g. {{"n": "v"}}' using errcode = '22023';
    end if;
    if starts_with(queue, 'postgres:') then
        into_queue := substr(queue, 10);
    elsif starts_with(queue, 'kafka:') or starts_with(queue, 'rabbitmq:') or starts_with(queue, 'sqs:') then
        if delay > interval '0' then
            due := clock_timestamp() + delay;
        end if;
        if current_setting('synchronous_commit') = 'off' then
            perform set_config('synchronous_commit', 'on', true);
        end if;
        insert into {schema}.outbox (destination, key, order_key, body, headers, due_at)
        values (queue, key, case when starts_with(queue, 'sqs:') then given ->> 'MessageGroupId' else key end,
                payload, convert_to(given::text, 'UTF8'), due)
        returning id into new_id;
        if due is null then
            perform pg_notify('idemconsumer_queue', 'outbox:' || left(queue, 1000));
        end if;
        return new_id;
    elsif lower(btrim(split_part(queue, ':', 1))) in ('postgres', 'kafka', 'rabbitmq', 'sqs') and strpos(queue, ':') > 0 then
        raise exception 'the destination % names no broker and would be a queue of that name', quote_literal(queue)
            using errcode = '22023', hint = format('Write %s, or postgres:%s if that is the queue''s name.',
                lower(btrim(split_part(queue, ':', 1))) || substr(queue, strpos(queue, ':')), queue);
    end if;
    if delay > interval '0' then
        insert into {schema}.delayed (name, message_id, body, headers, due_at)
        values (into_queue, key, payload, convert_to(given::text, 'UTF8'), clock_timestamp() + delay)
        returning id into new_id;
        return new_id;
    end if;
    insert into {schema}.queue (name, message_id, body, headers)
    values (into_queue, key, payload, convert_to(given::text, 'UTF8'))
    returning id into new_id;
    perform pg_notify('idemconsumer_queue', into_queue);
    return new_id;
end
$$;

-- As in 0017. A signal that is named like the end of a child would make whoever waits for that child due again and again.
create or replace function {schema}.signal(
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
    return {schema}.send_signal({schema}.saga_key(app, handler, signal.key, tenant),
        {schema}.saga_scope(app, handler, tenant), signal.name, convert_to(payload::text, 'UTF8'),
        case when payload is not null then 'application/json' end);
end
$$;
