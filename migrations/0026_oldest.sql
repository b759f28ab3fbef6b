-- Which programs may run on this schema (R32). {schema} is the configured schema.

-- A program that knows no migration of this number is refused at its start. A migration that takes something away sets it
-- in a row of its own choice: update {schema}.migration set oldest = … where version = …. The highest one counts.
alter table {schema}.migration add column oldest integer;
