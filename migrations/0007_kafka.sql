-- Kafka: how far each partition is read, and where one stands still. {schema} is the configured schema.

-- The group's offset in Kafka says which row it was committed after; a row that this database does not have was lost with
-- the messages before it (K12).
create table {schema}.kafka_position (
    cluster     text not null,
    group_name  text not null,
    topic       text not null,
    partition   integer not null,
    history     text not null,
    base        bigint not null,
    counter     bigint not null,
    position    bigint not null,
    changed_at  timestamptz not null,
    quiet       bigint,
    leader      integer,
    primary key (cluster, group_name, topic, partition)
) with (fillfactor = 50);

comment on table {schema}.kafka_position is 'Up to where each partition is finished, as this database knows it';
comment on column {schema}.kafka_position.history is 'Drawn anew whenever reading begins elsewhere than where it ended';
comment on column {schema}.kafka_position.base is 'Where this history began';
comment on column {schema}.kafka_position.counter is
    'Grows with each write, from one history to the next too: of two writes it tells the later one';
comment on column {schema}.kafka_position.position is
    'Every message of this history below it is decided in this database';
comment on column {schema}.kafka_position.quiet is
    'The counter at which the last reader left with nothing in hand. With any other one whoever reads next has to expect a '
    'message that killed its last reader (K10)';
comment on column {schema}.kafka_position.leader is
    'The epoch of the leader that wrote the message before the position, or that led when the position was taken: it tells '
    'one log from another (K21)';

create table {schema}.kafka_stop (
    cluster     text not null,
    group_name  text not null,
    topic       text not null,
    partition   integer not null,
    first       bigint not null,
    next        bigint not null,
    error       text not null,
    skip        boolean not null default false,
    since       timestamptz not null,
    seen_at     timestamptz not null,
    primary key (cluster, group_name, topic, partition, first)
);

comment on table {schema}.kafka_stop is
    'Where partitions stand still before something that the client cannot read, and what a person has decided (K13)';
comment on column {schema}.kafka_stop.first is 'The offset of the record or batch';
comment on column {schema}.kafka_stop.next is 'The offset behind it';
comment on column {schema}.kafka_stop.skip is 'Put a dead letter in its place, and go on';
comment on column {schema}.kafka_stop.seen_at is 'When a worker last stood there';
