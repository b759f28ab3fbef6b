-- Where partitions of Kafka stand still before something that the client cannot read, and what a person has decided (K13).
create table {schema}.kafka_stop (
    cluster     text not null,
    group_name  text not null,
    topic       text not null,
    partition   integer not null,
    first       bigint not null,                 -- the offset of the record or batch
    next        bigint not null,                 -- the offset behind it
    error       text not null,
    skip        boolean not null default false,  -- put a dead letter in its place, and go on
    since       timestamptz not null,
    seen_at     timestamptz not null,            -- when a worker last stood there
    primary key (cluster, group_name, topic, partition, first)
);
