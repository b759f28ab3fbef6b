-- What was accepted may come back by its handler's own broker, may be asked about before it is too late, and says when it was
-- accepted (H46 to H49). {schema} is the configured schema.

-- A row stays as long as its record. `until`, and what is kept for the handler's reconcile, go with the deadline. Rows of
-- earlier versions have no `created_at`.
alter table {schema}.accepted alter column until drop not null;
alter table {schema}.accepted
    add column created_at timestamptz,
    add column via text,                         -- where its message was sent; null: into the handler's own queue
    add column token bytea,                      -- that message has it too; null once it was claimed, or is not awaited
    add column body bytea,                       -- of the message, as in the handler's own queue
    add column headers bytea,
    add column asked integer not null default 0, -- how many times a reconcile was begun; who begins it owns this number
    add column failed integer not null default 0;
alter table {schema}.accepted alter column created_at set default clock_timestamp();
