-- How far keys were taken over from a table of the user's (R31). {schema} is the configured schema.

-- Only of an import that has not come to its end: the next one after that reads the whole table again.
create table {schema}.import_position (
    app         text not null,
    handler     text not null,
    source      text not null,                   -- the table, with its schema
    chosen      text not null,                   -- what was asked for: with anything else it begins anew
    position    text[] not null,                 -- of the last row, in the order of its primary key
    changed_at  timestamptz not null,
    primary key (app, handler, source)
);
