-- A dead letter keeps all that its broker gave, and of a large body the beginning; a saga's message comes back whole.
alter table {schema}.dead_letter
    add column delivered    bytea,   -- JSON: message id, record key, time, properties, repeated headers
    add column body_size    bigint,  -- bytes of the whole body, of which `body` may be the beginning
    add column body_sha256  bytea,   -- of the whole body
    add column content      bytea;   -- hash of a message that has no position or id of its own (R24)

create index dead_letter_content on {schema}.dead_letter (content) where content is not null;

alter table {schema}.saga add column delivered bytea;  -- as in dead_letter
