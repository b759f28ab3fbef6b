-- Whether who reads a partition of Kafka next has to expect a message that killed its last reader (K10).
-- {schema} is the configured schema.

-- The counter at which the last reader left, with nothing in hand. Otherwise, and of readers of an earlier version,
-- another number or null.
alter table {schema}.kafka_position add column quiet bigint;
