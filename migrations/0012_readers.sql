-- Who reads a delivery that may have killed a worker (B17). {schema} is the configured schema.

-- A number on which its reader holds an advisory lock for as long as it reads. Null: a message that runs, or a reader of
-- an earlier version, of which nobody knows whether it is still alive.
alter table {schema}.attempt add column reader bigint;
