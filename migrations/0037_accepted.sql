-- Until when what was accepted has to have ended (H44). {schema} is the configured schema.

-- Only for handlers with `max_age`. A row goes once its time is over, whatever became of its record.
create table {schema}.accepted (
    key      bytea primary key,
    app      text not null,                      -- as in the names of scopes
    handler  text not null,
    until    timestamptz not null
);

create index accepted_until on {schema}.accepted (until);
