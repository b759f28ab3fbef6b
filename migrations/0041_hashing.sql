-- How the keys of this schema are hashed: with which secret, from the first record on (R38). {schema} is the configured schema.
create table {schema}.hashing (
    one     boolean primary key default true check (one),
    secret  bytea not null,                      -- tells secrets apart, and is none; empty: SHA-256 without a secret
    since   timestamptz not null default clock_timestamp()
);
