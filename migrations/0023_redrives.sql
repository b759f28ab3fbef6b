-- Dead letters that are run once more (O1 to O4). {schema} is the configured schema.

-- When it was redriven last. Null: it waits for a person. A letter that is written again waits for one again.
alter table {schema}.dead_letter add column redriven_at timestamptz;

-- Each is read from its end, or from a place in it.
create index dead_letter_handler on {schema}.dead_letter (handler, id);
create index dead_letter_reason on {schema}.dead_letter (reason, id);
create index dead_letter_last on {schema}.dead_letter (last_at);

-- The trace of a ticket: who gave it, when, and what came of it.
create table {schema}.redrive (
    id        bigint generated always as identity primary key,
    letter    bigint not null,
    key       bytea,                             -- null: its message had none
    run       text not null,                     -- of one command; it redrives a letter once
    by        text not null,
    at        timestamptz not null,
    queued    bigint not null,                   -- the ticket's row in the queue
    outcome   text,                              -- applied rejected dead; null: not yet, or there is no key to tell it by
    ended_at  timestamptz
);

create index redrive_letter on {schema}.redrive (letter);
create index redrive_key on {schema}.redrive (key) where key is not null;

-- Makes a ticket for one letter, in the caller's transaction: the letter is closed, its DEAD record waits for the ticket
-- as one that is PENDING does for its next attempt, its attempts are forgotten, and the message is in the queue. Nothing is
-- waited for: whoever holds the letter, or its key (J1), decides about it now. Returns what became of it.
create function {schema}.redrive_letter(letter bigint, queue text, headers bytea, run text, by text)
returns text language plpgsql set enable_seqscan = off as $$
#variable_conflict use_column
declare
    its {schema}.dead_letter;
    found smallint;
    number bigint;
begin
    select * into its from {schema}.dead_letter as d where d.id = redrive_letter.letter for update skip locked;
    if its.id is null then
        return 'busy';
    end if;
    if its.redriven_at is not null then
        return 'redriven';
    end if;
    if its.key is not null then
        if not pg_try_advisory_xact_lock(('x' || encode(substring(its.key for 8), 'hex'))::bit(64)::bigint) then
            return 'busy';
        end if;
        if exists (select from {schema}.saga as s where s.key = its.key) then
            return 'saga';
        end if;
        select r.state into found from {schema}.record as r where r.key = its.key;
        if found is null then
            insert into {schema}.scope (name) values (its.scope) on conflict (name) do nothing;
            insert into {schema}.record (key, scope_id, state, changed_at)
            select its.key, c.id, 0, clock_timestamp() from {schema}.scope as c where c.name = its.scope;
        elsif found <> 5 then
            return 'decided';
        else
            update {schema}.record as r set state = 0, changed_at = clock_timestamp() where r.key = its.key;
        end if;
        delete from {schema}.attempt as a where a.key = its.key;
    end if;
    -- A former ticket that came to its end, and was not settled.
    delete from {schema}.queue as q
    where q.id in (select t.queued from {schema}.redrive as t where t.letter = its.id and t.outcome is not null);
    insert into {schema}.queue (name, body, headers) values (redrive_letter.queue, its.body, redrive_letter.headers)
    returning queue.id into number;
    update {schema}.dead_letter as d set redriven_at = clock_timestamp() where d.id = its.id;
    insert into {schema}.redrive (letter, key, run, by, at, queued)
    values (its.id, its.key, redrive_letter.run, redrive_letter.by, clock_timestamp(), number);
    perform pg_notify('idemconsumer_queue', redrive_letter.queue);
    return 'redrives';
end
$$;

-- The outcome, in the commit that decides the key: it has taken the PENDING record, and left another one. Also by workers of
-- the version before, with whatever rights and search_path.
create function {schema}.redrive_ended() returns trigger language plpgsql security definer
    set search_path = pg_catalog, pg_temp set enable_seqscan = off as $$
begin
    update {schema}.redrive as t
    set outcome = case r.state when 3 then 'applied' when 4 then 'rejected' else 'dead' end, ended_at = clock_timestamp()
    from {schema}.record as r
    where t.key = old.key and t.outcome is null and r.key = old.key and r.state in (3, 4, 5);
    return null;
end
$$;

create constraint trigger redrive_ended after delete on {schema}.record
    deferrable initially deferred for each row when (old.state = 0)
    execute function {schema}.redrive_ended();

-- A letter that is written again waits for a person again, whichever version's worker writes it.
create function {schema}.reopen_letter() returns trigger language plpgsql security definer
    set search_path = pg_catalog, pg_temp set enable_seqscan = off as $$
begin
    new.redriven_at := null;
    update {schema}.redrive as t set outcome = 'dead', ended_at = clock_timestamp()
    where t.letter = new.id and t.outcome is null;
    return new;
end
$$;

create trigger reopened before update of arrivals on {schema}.dead_letter
    for each row when (old.redriven_at is not null and new.arrivals > old.arrivals)
    execute function {schema}.reopen_letter();
