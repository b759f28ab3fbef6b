-- One pruner for the schema, and where it has to look (R27, R28). {schema} is the configured schema.

-- Between two passes `until` says when the next one is due; during one, until when its pruner has to be heard of.
create table {schema}.upkeep (
    what      text primary key,
    by        text,                              -- null between two passes
    begun_at  timestamptz,
    ended_at  timestamptz,
    until     timestamptz not null default '-infinity'
) with (fillfactor = 50);

insert into {schema}.upkeep (what) values ('records');

-- Ranges of blocks of `record`, as they were looked at: nothing in them expires before `look_at`.
create table {schema}.upkeep_range (
    low        bigint primary key,               -- its first block
    filenode   oid not null,                     -- of `record`: another one has other blocks
    looked_at  timestamptz not null,
    look_at    timestamptz not null
) with (fillfactor = 70);

-- What pruning frees is used again before a fifth of a large table is dead. These change no row, and block nobody.
alter table {schema}.record set (autovacuum_vacuum_scale_factor = 0.02, autovacuum_vacuum_threshold = 10000);
alter table {schema}.result set (autovacuum_vacuum_scale_factor = 0.02, autovacuum_vacuum_threshold = 10000);
alter table {schema}.step set (autovacuum_vacuum_scale_factor = 0.02, autovacuum_vacuum_threshold = 10000);
alter table {schema}.history set (autovacuum_vacuum_scale_factor = 0.02, autovacuum_vacuum_threshold = 10000);
