-- Dead letters that are forwarded to a destination (O19). {schema} is the configured schema.

-- A row comes with its letter, in one commit, and goes with it. Of letters that nobody forwards there is none.
create table {schema}.forward (
    letter        bigint primary key,
    app           text not null,
    handler       text not null,
    round         integer not null default 1,      -- how many times the letter was written: once, and after each redrive
    tries         integer not null default 0,      -- of this round
    due_at        timestamptz not null,            -- from when on any worker of the app may take it
    forwarded_at  timestamptz                      -- null: it is to be forwarded
);

create index forward_due on {schema}.forward (app, due_at) where forwarded_at is null;

-- Whoever deletes letters, also of the version before. No foreign key, which would forbid to truncate them.
create function {schema}.forget_forwards() returns trigger language plpgsql security definer
    set search_path = pg_catalog, pg_temp set enable_seqscan = off as $$
begin
    delete from {schema}.forward as f using gone where f.letter = gone.id;
    return null;
end
$$;

create trigger forwards after delete on {schema}.dead_letter referencing old table as gone
    for each statement execute function {schema}.forget_forwards();
