-- Dead letters: kept, forwarded, run once more (O1 to O5, O19). {schema} is the configured schema.

create table {schema}.dead_letter (
    id           bigint generated always as identity primary key,
    identity     bytea not null unique,
    handler      text not null,
    scope        text not null,
    source       text not null,
    position     text not null,
    reason       text not null,
    error        text not null,
    key          bytea,
    body         bytea not null,
    headers      bytea not null,
    attempts     integer not null,
    arrivals     integer not null default 1,
    first_at     timestamptz not null,
    last_at      timestamptz not null,
    delivered    bytea,
    body_size    bigint,
    body_sha256  bytea,
    content      bytea,
    redriven_at  timestamptz,
    emptied_at   timestamptz,
    traceback    text,
    round        integer not null default 1,
    forwarded_at timestamptz
);

-- People read each from its end, or from a place in it. `dead_letter_open` is for those who count by handler and
-- reason (O11, O30), without reading the table, in which the messages are.
create index dead_letter_key on {schema}.dead_letter (key) where key is not null;
create index dead_letter_content on {schema}.dead_letter (content) where content is not null;
create index dead_letter_handler on {schema}.dead_letter (handler, id);
create index dead_letter_reason on {schema}.dead_letter (reason, id);
create index dead_letter_last on {schema}.dead_letter (last_at);
create index dead_letter_open on {schema}.dead_letter (scope, reason, last_at, first_at) where redriven_at is null;

comment on table {schema}.dead_letter is 'Messages that were put aside, and why';
comment on column {schema}.dead_letter.identity is 'Hash of source, reason, and key or body: the same one is one row (R24)';
comment on column {schema}.dead_letter.key is 'As in record; null: the message had none';
comment on column {schema}.dead_letter.body is 'Of a large one the beginning';
comment on column {schema}.dead_letter.headers is 'JSON; bytea, since jsonb cannot hold NUL';
comment on column {schema}.dead_letter.arrivals is 'How many times the message arrived';
comment on column {schema}.dead_letter.delivered is
    'JSON: what else the broker gave: message id, record key, time, properties, repeated headers';
comment on column {schema}.dead_letter.body_size is 'Bytes of the whole body';
comment on column {schema}.dead_letter.body_sha256 is 'Of the whole body';
comment on column {schema}.dead_letter.content is 'Hash of a message that has no position or id of its own (R24)';
comment on column {schema}.dead_letter.redriven_at is 'When it was redriven last; null: it waits for a person';
comment on column {schema}.dead_letter.emptied_at is 'When the message, and what else of it may be personal, was dropped';
comment on column {schema}.dead_letter.round is 'How many times it was written: once, and after each redrive';
comment on column {schema}.dead_letter.forwarded_at is
    'When it was sent to where its handler says, in this round; null: not yet, or nowhere';

-- A traceback quotes what the exception says, which may be personal: it goes with the message, whoever drops that.
create function {schema}.empty_letter() returns trigger language plpgsql as $$
begin
    new.traceback := null;
    return new;
end
$$;

create trigger emptied before update of emptied_at on {schema}.dead_letter
    for each row when (new.emptied_at is not null and new.traceback is not null)
    execute function {schema}.empty_letter();

-- Where the text of an error names the line of an exception (`describe` in engine/blame.py): that line, else null. Without
-- a regular expression over the whole text, which is slow for a million letters.
create function {schema}.error_place(error text) returns text language sql immutable as $$
    select case when tail ~ '^\S+:\d+ ' then tail end
    from (select case when right(error, 1) = ')' then left(right(error, strpos(reverse(error), '(') - 1), -1) end)
        as t (tail)
$$;

-- And the exception's type.
create function {schema}.error_type(error text) returns text language sql immutable as $$
    select split_part(split_part(split_part(split_part(error, E'\n', 1), ':', 1), ' ', 1), '(', 1)
$$;

create table {schema}.dead_retention (
    app      text not null,
    handler  text not null,
    letters  interval,
    bodies   interval,
    primary key (app, handler)
);

comment on table {schema}.dead_retention is
    'How long dead letters are kept, as the handler that was started last says it (O5)';
comment on column {schema}.dead_retention.app is 'As in the names of scopes';
comment on column {schema}.dead_retention.letters is 'Null: for ever';
comment on column {schema}.dead_retention.bodies is 'Of their messages; null: as long as the letter';

create table {schema}.redrive (
    id        bigint generated always as identity primary key,
    letter    bigint not null,
    key       bytea,
    run       text not null,
    by        text not null,
    at        timestamptz not null,
    queued    bigint not null,
    outcome   text,
    ended_at  timestamptz
);

create index redrive_letter on {schema}.redrive (letter);
create index redrive_key on {schema}.redrive (key) where key is not null;
create index redrive_run on {schema}.redrive (run, id);

comment on table {schema}.redrive is 'Who had dead letters run once more, when, and what came of it';
comment on column {schema}.redrive.letter is '0: no letter, but the word that the run was cancelled';
comment on column {schema}.redrive.key is 'Null: the message had none';
comment on column {schema}.redrive.run is 'Of one command, which redrives a letter once';
comment on column {schema}.redrive.queued is 'The ticket''s row in the queue; 0: its saga was resumed';
comment on column {schema}.redrive.outcome is 'applied, rejected, dead or cancelled; null: not yet, or there is no key to tell it by';

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

-- Takes a ticket back: the letter waits for a person again, and its record is DEAD. Only one that nobody has in hand, and
-- whose key nobody decides about right now (J1); else nothing is done, and that is said.
create function {schema}.cancel_ticket(ticket bigint)
returns boolean language plpgsql set enable_seqscan = off as $$
#variable_conflict use_column
declare
    its {schema}.redrive;
begin
    select * into its from {schema}.redrive as t where t.id = ticket and t.outcome is null for update skip locked;
    if its.key is not null then
        if not pg_try_advisory_xact_lock(('x' || encode(substring(its.key for 8), 'hex'))::bit(64)::bigint)
            or not exists (select from {schema}.record as r where r.key = its.key and r.state = 0)
        then
            return false;
        end if;
    end if;
    if not exists (select from {schema}.queue as q
                   where q.id = its.queued and q.visible_at <= clock_timestamp() for update skip locked)
    then
        return false;
    end if;
    delete from {schema}.queue as q where q.id = its.queued;
    -- No handler runs in this transaction, so it may seal what it decides.
    perform set_config('idemconsumer.open', 'cancel', true), {schema}.seal('cancel');
    update {schema}.record as r set state = 5, changed_at = clock_timestamp() where r.key = its.key;
    update {schema}.dead_letter as d set redriven_at = null where d.id = its.letter;
    update {schema}.redrive as t set outcome = 'cancelled', ended_at = clock_timestamp() where t.id = its.id;
    return true;
end
$$;

-- The outcome, in the commit that decides the key: it has taken the PENDING record, and left another one. With whatever
-- rights and search_path.
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

-- A letter that is written again waits for a person again.
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

-- Whoever deletes letters: one that was not forwarded yet goes nowhere any more. No foreign key, which would forbid to
-- truncate them.
create function {schema}.forget_forwards() returns trigger language plpgsql security definer
    set search_path = pg_catalog, pg_temp set enable_seqscan = off as $$
begin
    delete from {schema}.outbox as o where o.letter = any(array(select gone.id from gone));
    return null;
end
$$;

create trigger forwards after delete on {schema}.dead_letter referencing old table as gone
    for each statement execute function {schema}.forget_forwards();

-- A trigger fires without that right. With it, somebody could have one of these fire for a table of their own.
revoke execute on function {schema}.redrive_ended(), {schema}.reopen_letter(), {schema}.forget_forwards() from public;
