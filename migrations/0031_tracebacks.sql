-- A dead letter of an exception keeps its traceback. {schema} is the configured schema.
alter table {schema}.dead_letter add column traceback text;

-- It quotes what the exception says, which may be personal: it goes with the message, whichever version's worker drops that.
create function {schema}.empty_letter() returns trigger language plpgsql as $$
begin
    new.traceback := null;
    return new;
end
$$;

create trigger emptied before update of emptied_at on {schema}.dead_letter
    for each row when (new.emptied_at is not null and new.traceback is not null)
    execute function {schema}.empty_letter();

-- As in 0023. A worker of the version before writes another error, and leaves the traceback of the last one.
create or replace function {schema}.reopen_letter() returns trigger language plpgsql security definer
    set search_path = pg_catalog, pg_temp set enable_seqscan = off as $$
begin
    new.redriven_at := null;
    if new.error is distinct from old.error and new.traceback is not distinct from old.traceback then
        new.traceback := null;
    end if;
    update {schema}.redrive as t set outcome = 'dead', ended_at = clock_timestamp()
    where t.letter = new.id and t.outcome is null;
    return new;
end
$$;
