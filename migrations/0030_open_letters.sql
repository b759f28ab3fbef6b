-- Dead letters that are still open, for metrics: counted by handler and reason without reading the table, in which the
-- messages are. {schema} is the configured schema. Made under a lock that lets letters be read; a second for a million.
create index dead_letter_open on {schema}.dead_letter (scope, reason, first_at) where redriven_at is null;
