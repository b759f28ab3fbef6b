-- Outgoing messages that are on their way to other brokers (X1). {schema} is the configured schema.

-- A row comes with the transaction that publishes it, and goes when its broker has confirmed it.
create table {schema}.outbox (
    id           bigint generated always as identity primary key,
    destination  text not null,                  -- kafka:topic, rabbitmq:exchange/key, sqs:queue
    message_id   uuid not null default gen_random_uuid(),  -- the same each time that it is sent, and in a restored backup (X3)
    key          text,
    order_key    text,                           -- those that have the same one stay in order (X5)
    body         bytea not null,
    headers      bytea not null default '\x7b7d',
    created_at   timestamptz not null default clock_timestamp(),  -- or when it fell due
    due_at       timestamptz,                    -- null: it can be sent now
    tries        integer not null default 0,     -- how many times its broker has refused it
    error        text,
    parked_at    timestamptz                     -- it waits for a person
) with (autovacuum_vacuum_scale_factor = 0.02, autovacuum_vacuum_cost_delay = 0);

create index outbox_ready on {schema}.outbox (destination, id) where due_at is null and parked_at is null;
create index outbox_due on {schema}.outbox (due_at, destination) where due_at is not null and parked_at is null;
create index outbox_held on {schema}.outbox (destination, order_key)
    where tries > 0 and due_at is not null and parked_at is null;
create index outbox_parked on {schema}.outbox (destination, id) where parked_at is not null;

-- As in 0013. What begins with the name of another broker is no queue, but on its way there; `postgres:` may stand before
-- a queue's name, whatever that is.
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
