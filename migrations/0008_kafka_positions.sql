-- Up to where each partition of Kafka is finished, as this database knows it. The group's offset in Kafka says which row
-- it was committed after; a row that this database does not have was lost with the messages before it (K12).
create table {schema}.kafka_position (
    cluster     text not null,
    group_name  text not null,
    topic       text not null,
    partition   integer not null,
    history     text not null,         -- drawn anew whenever reading begins elsewhere than where it ended
    former      text,                  -- the history before this one
    base        bigint not null,       -- where this history began
    counter     bigint not null,       -- grows with each write of this history
    position    bigint not null,       -- every message of this history below it is decided in this database
    changed_at  timestamptz not null,
    primary key (cluster, group_name, topic, partition)
) with (fillfactor = 50);
