-- What is relayed has to last (X9). {schema} is the configured schema.

-- As in 0038. A commit that does not wait for the disk is seen by a relay before it lasts: its message would be out, and the
-- transaction gone with a crash of the server.
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
