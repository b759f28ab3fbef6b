-- How long dead letters are kept (O5). {schema} is the configured schema.

-- As the handler that was started last says it; null: for ever. `app` is as in the names of scopes.
create table {schema}.dead_retention (
    app      text not null,
    handler  text not null,
    letters  interval,
    bodies   interval,
    primary key (app, handler)
);

-- The message is gone from the letter, and what else of it may be personal.
alter table {schema}.dead_letter add column emptied_at timestamptz;

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
