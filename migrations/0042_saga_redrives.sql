-- Sagas that wait for a person go on where they stopped when their dead letters are redriven (O24). {schema} is the configured
-- schema.

-- The letter that it was redriven from, until it ends or is put aside again.
alter table {schema}.saga add column letter bigint;

-- As `redrive_letter` in 0023, of a letter whose saga waits for a person. To the saga it does what `sagas resume` does. Nothing
-- is waited for: whoever holds the letter or the saga decides about it now. Returns what became of it.
create function {schema}.redrive_saga(letter bigint, run text, by text)
returns text language plpgsql set enable_seqscan = off as $$
#variable_conflict use_column
declare
    its {schema}.dead_letter;
    held {schema}.saga;
begin
    select * into its from {schema}.dead_letter as d where d.id = redrive_saga.letter for update skip locked;
    if its.id is null then
        return 'busy';
    end if;
    if its.redriven_at is not null then
        return 'redriven';
    end if;
    select * into held from {schema}.saga as s where s.key = its.key for update skip locked;
    if held.key is null and exists (select from {schema}.saga as s where s.key = its.key) then
        return 'busy';
    end if;
    if held.key is null or held.parked is null then
        return 'decided';
    end if;
    insert into {schema}.history (key, at, what, detail)
    values (its.key, clock_timestamp(), 'resumed', 'letter ' || its.id || ' redriven by ' || redrive_saga.by);
    update {schema}.saga as s
    set token = greatest(s.token + 1, nextval('{schema}.saga_token')), parked = null, worker = null, stale = false,
        due = clock_timestamp(), attempt = 0, letter = its.id
    where s.key = its.key;
    update {schema}.record as r set state = held.state, changed_at = clock_timestamp() where r.key = its.key;
    update {schema}.dead_letter as d set redriven_at = clock_timestamp() where d.key = its.key and d.redriven_at is null;
    insert into {schema}.redrive (letter, key, run, by, at, queued)
    values (its.id, its.key, redrive_saga.run, redrive_saga.by, clock_timestamp(), 0);
    return 'resumes';
end
$$;

-- What came of it, in the commit that decides it, whichever version's worker or person does. For all other sagas these are one
-- condition each, and no call.
create function {schema}.saga_redrive_ended() returns trigger language plpgsql security definer
    set search_path = pg_catalog, pg_temp set enable_seqscan = off as $$
begin
    update {schema}.redrive as t
    set outcome = case r.state when 3 then 'applied' when 4 then 'rejected' else 'dead' end, ended_at = clock_timestamp()
    from {schema}.record as r
    where t.key = old.key and t.outcome is null and r.key = old.key and r.state in (3, 4, 5);
    return null;
end
$$;

create constraint trigger redrive_ended after delete on {schema}.saga
    deferrable initially deferred for each row when (old.letter is not null)
    execute function {schema}.saga_redrive_ended();

create function {schema}.saga_parked_again() returns trigger language plpgsql security definer
    set search_path = pg_catalog, pg_temp set enable_seqscan = off as $$
begin
    update {schema}.redrive as t set outcome = 'dead', ended_at = clock_timestamp()
    where t.key = old.key and t.outcome is null;
    new.letter := null;
    return new;
end
$$;

create trigger parked_again before update of parked on {schema}.saga
    for each row when (old.letter is not null and new.parked is not null)
    execute function {schema}.saga_parked_again();

-- Who may write to a table needs no right to call its triggers' functions.
revoke execute on function {schema}.saga_redrive_ended(), {schema}.saga_parked_again() from public;
