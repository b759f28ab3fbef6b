-- What became of deliveries, for people who ask about a key (O22). {schema} is the configured schema.

-- One row for those of a handler that were written together. Arrays, and texts of one line each, are parallel; one element of
-- sources, outcomes, attempts, ended or arrived stands for all. Nothing decides by this table, and no row of it is needed.
create table {schema}.delivery_log (
    at         timestamptz not null,
    until      timestamptz not null,            -- from when on it may be pruned
    app        text not null,
    handler    text not null,
    worker     text not null,                   -- host and process
    keys       bigint[] not null,               -- the first 8 bytes of each stored key; null: it was forgotten
    sources    text not null,
    positions  text not null,                   -- in the source, or the message's id; empty: it was forgotten
    outcomes   text not null,
    attempts   integer[] not null,
    ended      integer[] not null,              -- milliseconds before `at`
    arrived    integer[] not null               -- the same, in the process
) with (toast_tuple_target = 8160);             -- to compress a row would cost more than to write it

-- What a search compares is read in place.
alter table {schema}.delivery_log alter column keys set storage plain;

create index delivery_log_until on {schema}.delivery_log (until);

-- Returns what is wrong. The log may be missing, locked, full or forbidden: that ends no transaction but this block's own,
-- and nobody waits for it.
create function {schema}.log_deliveries(
    keep double precision, app text, handler text, worker text, keys bigint[], sources text, positions text, outcomes text,
    attempts integer[], ended integer[], arrived integer[]
) returns text language plpgsql as $$
declare
    written constant timestamptz := pg_catalog.clock_timestamp();
begin
    lock table {schema}.delivery_log in row exclusive mode nowait;
    insert into {schema}.delivery_log
    values (written, written operator(pg_catalog.+) pg_catalog.make_interval(secs => log_deliveries.keep),
        log_deliveries.app, log_deliveries.handler, log_deliveries.worker, log_deliveries.keys, log_deliveries.sources,
        log_deliveries.positions, log_deliveries.outcomes, log_deliveries.attempts, log_deliveries.ended,
        log_deliveries.arrived);
    return null;
exception when others then
    return sqlerrm;
end
$$;
