-- When a worker has last looked at a schedule, to the day: one that nobody looks at any more is pruned (L53).
-- {schema} is the configured schema.
alter table {schema}.schedule add column looked_at timestamptz not null default clock_timestamp();
