-- Operations: workers on record, what people want of them, pruning, the delivery log. {schema} is the configured schema.

create table {schema}.process (
    id          bigint generated always as identity primary key,
    app         text not null,
    host        text not null,
    pid         integer not null,
    place       integer not null,
    version     text not null,
    state       text not null,
    handlers    jsonb not null,
    started_at  timestamptz not null,
    seen_at     timestamptz not null,
    drain_at    timestamptz
) with (fillfactor = 50);

comment on table {schema}.process is
    'One row a worker process, refreshed while it runs and deleted when it leaves in order (O13). Leases are in `worker`';
comment on column {schema}.process.place is 'Among those of its launcher';
comment on column {schema}.process.version is 'Of idemconsumer';
comment on column {schema}.process.state is 'running or draining';
comment on column {schema}.process.handlers is 'By name: sources, whether it is paused, what it has done';
comment on column {schema}.process.drain_at is 'Since when somebody has wanted it to leave';

create table {schema}.control (
    app      text not null,
    handler  text not null,
    at       timestamptz not null,
    by       text not null,
    reason   text,
    primary key (app, handler)
);

comment on table {schema}.control is 'The handlers that are paused (O14); no row: it runs';

create table {schema}.audit (
    id      bigint generated always as identity primary key,
    at      timestamptz not null,
    by      text not null,
    role    text not null,
    what    text not null,
    target  text not null,
    reason  text
);

comment on table {schema}.audit is 'What people have decided, and when (O16). Few rows, which nobody deletes';
comment on column {schema}.audit.by is 'As they say themselves';
comment on column {schema}.audit.role is 'Of the database';
comment on column {schema}.audit.what is 'pause, resume, drain, reload, redrive …';

create table {schema}.upkeep (
    what      text primary key,
    by        text,
    begun_at  timestamptz,
    ended_at  timestamptz,
    until     timestamptz not null default '-infinity'
) with (fillfactor = 50);

insert into {schema}.upkeep (what) values ('records');

comment on table {schema}.upkeep is 'One pruner for the schema (R27)';
comment on column {schema}.upkeep.by is 'Null between two passes';
comment on column {schema}.upkeep.until is
    'Between two passes when the next one is due; during one, until when its pruner has to be heard of';

create table {schema}.upkeep_range (
    low        bigint primary key,
    filenode   oid not null,
    looked_at  timestamptz not null,
    look_at    timestamptz not null
) with (fillfactor = 70);

comment on table {schema}.upkeep_range is 'Ranges of blocks of `record`, as they were looked at (R28)';
comment on column {schema}.upkeep_range.low is 'Its first block';
comment on column {schema}.upkeep_range.filenode is 'Of `record`: another one has other blocks';
comment on column {schema}.upkeep_range.look_at is 'Nothing in it expires before';

-- What a search compares is read in place, and to compress a row would cost more than to write it.
create table {schema}.delivery_log (
    at         timestamptz not null,
    until      timestamptz not null,
    app        text not null,
    handler    text not null,
    worker     text not null,
    keys       bigint[] not null,
    sources    text not null,
    positions  text not null,
    outcomes   text not null,
    attempts   integer[] not null,
    ended      integer[] not null,
    arrived    integer[] not null,
    id         bigint generated always as identity,
    primary key (until, id)
) with (toast_tuple_target = 8160);

alter table {schema}.delivery_log alter column keys set storage plain;

comment on table {schema}.delivery_log is
    'What became of deliveries, for people who ask about a key (O22). One row for those of a handler that were written '
    'together: arrays, and texts of one line each, are parallel; one element of sources, outcomes, attempts, ended or '
    'arrived stands for all. Nothing decides by this table, and no row of it is needed';
comment on column {schema}.delivery_log.until is 'From then on it may be pruned';
comment on column {schema}.delivery_log.worker is 'Host and process';
comment on column {schema}.delivery_log.keys is 'The first 8 bytes of each stored key; null: it was forgotten';
comment on column {schema}.delivery_log.positions is 'In the source, or the message''s id; empty: it was forgotten';
comment on column {schema}.delivery_log.ended is 'Milliseconds before `at`';
comment on column {schema}.delivery_log.arrived is 'Milliseconds before `at`, in the process';

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

-- The sequences that would give a number which a row has already, as logical replication leaves them, and what to run (R43).
-- Rows are read first, since whoever inserts one meanwhile has asked its sequence before. Where no index begins with the
-- number, only the end of the table is read, and one that somebody has locked is not. The tokens of the queue need no look:
-- each taker has a range of its own. With the rights of its owner: others may not read these sequences.
create function {schema}.sequences_behind() returns table (of_table text, remedy text)
language plpgsql security definer set search_path = pg_catalog, pg_temp as $$
declare
    each record;
    most bigint;
begin
    for each in
        with numbered (sequence, of_table, number) as (
            select d.objid::regclass, d.refobjid::regclass, a.attname
            from pg_depend as d
            join pg_class as c on c.oid = d.objid and c.relkind = 'S'
            join pg_attribute as a on a.attrelid = d.refobjid and a.attnum = d.refobjsubid
            where d.classid = 'pg_class'::regclass and d.refclassid = 'pg_class'::regclass and d.deptype = 'i'
              and c.relnamespace = (select relnamespace from pg_class where oid = '{schema}.scope'::regclass)
            union all
            select s.sequence::regclass, s.of_table::regclass, s.number
            from (values ('{schema}.saga_token', '{schema}.saga', 'token'), ('{schema}.saga_token', '{schema}.step', 'position'),
                ('{schema}.saga_token', '{schema}.request', 'token')) as s (sequence, of_table, number)
        )
        select n.*, exists (
            select from pg_index as i join pg_attribute as a on a.attrelid = i.indrelid and a.attnum = i.indkey[0]
            where i.indrelid = n.of_table and a.attname = n.number
        ) as indexed
        from numbered as n order by n.of_table::text
    loop
        begin
            execute format('lock table %s in access share mode nowait', each.of_table);
        exception when lock_not_available then
            continue;
        end;
        execute format('select max(%I) from %s', each.number, each.of_table) || case when each.indexed then '' else format(
            ' where ctid >= ''(%s,0)''', greatest(0, pg_relation_size(each.of_table) / current_setting('block_size')::bigint - 64)
        ) end into most;
        if most > coalesce(pg_sequence_last_value(each.sequence), 0) then
            sequences_behind.of_table := (select relname from pg_class where oid = each.of_table);
            remedy := format('SELECT setval(%L, (SELECT max(%I) FROM %s))', each.sequence, each.number, each.of_table);
            return next;
        end if;
    end loop;
end
$$;

revoke execute on function {schema}.sequences_behind() from public;
