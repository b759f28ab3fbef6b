-- Schedules that start sagas (L53). {schema} is the configured schema.

-- One row for each schedule, with its rule: another expression or time zone is another schedule, and begins anew.
create table {schema}.schedule (
    app   text not null,
    name  text not null,
    rule  text not null,             -- expression and time zone
    last  timestamptz not null,      -- the slots up to here have been started or left out
    primary key (app, name, rule)
);
