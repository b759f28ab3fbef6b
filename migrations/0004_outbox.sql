-- The outbox: messages that are on their way to other brokers (X1). {schema} is the configured schema.

create table {schema}.outbox (
    id           bigint generated always as identity primary key,
    destination  text not null,
    message_id   uuid not null default gen_random_uuid(),
    key          text,
    order_key    text,
    body         bytea not null,
    headers      bytea not null default '\x7b7d',
    created_at   timestamptz not null default clock_timestamp(),
    due_at       timestamptz,
    tries        integer not null default 0,
    error        text,
    parked_at    timestamptz
) with (autovacuum_vacuum_scale_factor = 0.02, autovacuum_vacuum_cost_delay = 0);

create index outbox_ready on {schema}.outbox (destination, id) where due_at is null and parked_at is null;
create index outbox_due on {schema}.outbox (due_at, destination) where due_at is not null and parked_at is null;
create index outbox_held on {schema}.outbox (destination, order_key)
    where tries > 0 and due_at is not null and parked_at is null;
create index outbox_parked on {schema}.outbox (destination, id) where parked_at is not null;

comment on table {schema}.outbox is
    'A row comes with the transaction that publishes it, and goes when its broker has confirmed it';
comment on column {schema}.outbox.destination is 'kafka:topic, rabbitmq:exchange/key or sqs:queue';
comment on column {schema}.outbox.message_id is 'The same each time that it is sent, and in a restored backup (X3)';
comment on column {schema}.outbox.order_key is 'Those that have the same one stay in order (X5)';
comment on column {schema}.outbox.created_at is 'Or when it fell due';
comment on column {schema}.outbox.due_at is 'Null: it can be sent now';
comment on column {schema}.outbox.tries is 'How many times its broker has refused it';
comment on column {schema}.outbox.parked_at is 'Since when it has waited for a person';
