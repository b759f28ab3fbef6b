-- Messages that wait in this database: in a queue, until they are due, and as accepted. {schema} is the configured schema.

-- Ordered by `moved`, or else by id; visible_at is not indexed, so taking a message is a HOT update.
create table {schema}.queue (
    id          bigint generated always as identity primary key,
    name        text not null,
    message_id  text,
    body        bytea not null,
    headers     bytea not null default '\x7b7d',
    deliveries  integer not null default 0,
    token       bigint,
    visible_at  timestamptz not null default clock_timestamp(),
    moved       bigint
) with (fillfactor = 70, autovacuum_vacuum_scale_factor = 0.02, autovacuum_vacuum_cost_delay = 0);

create index queue_next on {schema}.queue (name, coalesce(moved, id));

create sequence {schema}.queue_token;

comment on table {schema}.queue is 'The queues behind `postgres:` sources; a row goes when its message is settled';
comment on column {schema}.queue.name is 'Of the queue';
comment on column {schema}.queue.token is 'Of the current delivery: a late settlement with an older one changes nothing';
comment on column {schema}.queue.visible_at is 'From then on it can be taken; later while it is being delivered';
comment on column {schema}.queue.moved is 'Its place instead of `id`, since a worker has had it in hand for long (P9)';

-- A table of its own: who takes from the queue does not walk over what waits for days.
create table {schema}.delayed (
    id          bigint generated always as identity primary key,
    name        text not null,
    message_id  text,
    body        bytea not null,
    headers     bytea not null default '\x7b7d',
    due_at      timestamptz not null
);

create index delayed_due on {schema}.delayed (name, due_at);

comment on table {schema}.delayed is 'Messages of the queues that are not due yet (P7)';

-- What begins with the name of another broker is on its way there (X1); `postgres:` may stand before a queue's name,
-- whatever that is. Other spellings of these names are refused, since nobody would look at a queue of that name. What is
-- relayed has to last (X9): a commit that does not wait for the disk is seen by a relay before it lasts, so its message
-- would be out, and the transaction gone with a crash of the server.
create function {schema}.publish_bytes(
    queue text, payload bytea, key text default null, headers jsonb default '{{}}', delay interval default null
)
returns bigint language plpgsql as $$
declare
    new_id bigint;
    into_queue text := queue;
    given jsonb := coalesce(publish_bytes.headers, '{{}}');
    not_text text;
    instead text;
begin
    if jsonb_typeof(given) <> 'object' then
        raise exception 'headers must be a JSON object of texts, e.g. {{"n": "v"}}' using errcode = '22023';
    end if;
    if given <> '{{}}' then
        select h.key into not_text from jsonb_each(given) as h
        where not case jsonb_typeof(h.value) when 'string' then true when 'null' then true
            when 'object' then h.value - 'base64' = '{{}}' and jsonb_typeof(h.value -> 'base64') is not distinct from 'string'
                and h.value ->> 'base64' ~ '^([A-Za-z0-9+/]{{4}})*([A-Za-z0-9+/]{{2}}==|[A-Za-z0-9+/]{{3}}=)?$'
            else false end
        limit 1;
        if found then
            raise exception 'the header % is not a text', quote_literal(not_text)
                using errcode = '22023', hint = 'Write {{"n": "1"}} for a number, {{"n": {{"base64": "AP8="}}}} for bytes, without line '
                    'breaks, and leave out what has no value.';
        end if;
    end if;
    if queue in ('', 'postgres:') then
        raise exception 'the queue has no name' using errcode = '22023', hint = 'Write one, such as orders or kafka:orders.';
    end if;
    if octet_length(queue) > 1000 then
        raise exception 'the name % has % bytes', quote_literal(left(queue, 60) || '...'), octet_length(queue)
            using errcode = '22023', hint = 'Write one of at most 1000, which fits into a row of an index.';
    end if;
    if starts_with(queue, 'postgres:') then
        into_queue := substr(queue, 10);
    elsif starts_with(queue, 'kafka:') or starts_with(queue, 'rabbitmq:') or starts_with(queue, 'sqs:') then
        instead := case
            when queue ~ '^kafka:' and queue !~ '^kafka:(?!\.{{1,2}}$)[a-zA-Z0-9._-]{{1,249}}$' then
                'Write a topic''s name: letters, digits, ''.'', ''_'', ''-''.'
            when queue ~ '^rabbitmq:' and octet_length(queue) not between 10 and 264 then
                'Write a queue''s name, or exchange/routing.key, of 1 to 255 bytes.'
            when queue ~ '^rabbitmq:' and octet_length(key) > 255 then
                'The key becomes the message id, of at most 255 bytes: give a hash of it.'
            when queue ~ '^sqs:' and queue !~ ('^sqs:(|arn:aws[a-z-]*:sqs:[a-z0-9-]+:[0-9]{{12}}:'
                    || '|https?://[][a-zA-Z0-9.:-]+/([^@?#[:space:]]*/)?)[a-zA-Z0-9_-]{{1,80}}(\.fifo)?$') then
                'Write a queue''s name, as sqs:orders, its ARN, or its URL without credentials.'
            when queue ~ '^sqs:' and coalesce(given ->> 'MessageGroupId', case when queue !~ '\.fifo$' then 'none' end, '')
                    !~ '^[!-~]{{1,128}}$' then
                'Write headers => jsonb_build_object(''MessageGroupId'', customer_id) for a FIFO queue; a group has 1 to 128 '
                || 'letters, digits or punctuation, no spaces.'
        end;
        if instead is not null then
            raise exception 'no broker takes a message to % like this',
                    quote_literal(regexp_replace(left(queue, 300), '//[^/]*@', '//***@'))
                using errcode = '22023', hint = instead;
        end if;
        if current_setting('synchronous_commit') = 'off' then
            perform set_config('synchronous_commit', 'on', true);
        end if;
        insert into {schema}.outbox (destination, key, order_key, body, headers, due_at)
        values (queue, key, case when starts_with(queue, 'sqs:') then given ->> 'MessageGroupId' else key end,
                payload, convert_to(given::text, 'UTF8'), case when delay > interval '0' then clock_timestamp() + delay end)
        returning id into new_id;
        if delay > interval '0' is not true then
            perform pg_notify('idemconsumer_queue', 'outbox:' || left(queue, 1000));
        end if;
        return new_id;
    elsif lower(btrim(split_part(queue, ':', 1))) in ('postgres', 'kafka', 'rabbitmq', 'sqs') and strpos(queue, ':') > 0 then
        raise exception 'the destination % names no broker and would be a queue of that name', quote_literal(queue)
            using errcode = '22023', hint = format('Write %s, or postgres:%s if that is the queue''s name.',
                lower(btrim(split_part(queue, ':', 1))) || substr(queue, strpos(queue, ':')), queue);
    end if;
    if delay > interval '0' then
        insert into {schema}.delayed (name, message_id, body, headers, due_at)
        values (into_queue, key, payload, convert_to(given::text, 'UTF8'), clock_timestamp() + delay)
        returning id into new_id;
        return new_id;
    end if;
    insert into {schema}.queue (name, message_id, body, headers)
    values (into_queue, key, payload, convert_to(given::text, 'UTF8'))
    returning id into new_id;
    perform pg_notify('idemconsumer_queue', into_queue);
    return new_id;
end
$$;

create function {schema}.publish(
    queue text, payload jsonb, key text default null, headers jsonb default '{{}}', delay interval default null
)
returns bigint language sql as $$
    select {schema}.publish_bytes(queue, convert_to(payload::text, 'UTF8'), key, headers, delay)
$$;

create table {schema}.accepted (
    key         bytea primary key,
    app         text not null,
    handler     text not null,
    until       timestamptz,
    created_at  timestamptz not null default clock_timestamp(),
    via         text,
    token       bytea,
    body        bytea,
    headers     bytea,
    asked       integer not null default 0,
    failed      integer not null default 0
);

create index accepted_until on {schema}.accepted (until);

comment on table {schema}.accepted is
    'What was accepted now, to be done later (H42 to H49); a row stays as long as its record';
comment on column {schema}.accepted.app is 'As in the names of scopes';
comment on column {schema}.accepted.until is 'When it has to have ended; null once that is decided, or if there is no deadline';
comment on column {schema}.accepted.via is 'Where its message was sent; null: into the handler''s own queue';
comment on column {schema}.accepted.token is 'That message has it too; null once it was claimed, or if it is not awaited';
comment on column {schema}.accepted.body is 'Of the message, for the handler''s reconcile; null once the deadline is decided';
comment on column {schema}.accepted.headers is 'As `body`';
comment on column {schema}.accepted.asked is 'How many times a reconcile was begun; whoever begins it owns this number';
comment on column {schema}.accepted.failed is 'How many of these failed';

-- Beside its record, in that commit (H40): what is to be done later, and with `via` null its message, in the queue of the
-- handler's next attempts. With the rights of its owner: who accepts for handlers need not be able to send to any other queue,
-- or to read what waits (H56). `headers` are those of the message; `asked`: it is kept for the handler's reconcile (H47).
create function {schema}.accept(
    key bytea, app text, handler text, max_age float8, via text, token bytea, asked boolean, body bytea, headers jsonb
)
returns void language plpgsql security definer
    set enable_seqscan = off set search_path = pg_catalog, pg_temp as $$
begin
    insert into {schema}.accepted as a (key, app, handler, until, via, token, body, headers)
    values (accept.key, accept.app, accept.handler, clock_timestamp() + make_interval(secs => accept.max_age), accept.via,
        accept.token, case when accept.asked then accept.body end,
        case when accept.asked then convert_to(accept.headers::text, 'UTF8') end)
    on conflict on constraint accepted_pkey do update
    set app = excluded.app, handler = excluded.handler, until = excluded.until, via = excluded.via, token = excluded.token,
        body = excluded.body, headers = excluded.headers, created_at = excluded.created_at, asked = 0, failed = 0;
    if accept.via is null then
        perform {schema}.publish_bytes('postgres:~~' || accept.app || '/' || accept.handler, accept.body, null, accept.headers);
    end if;
end
$$;

revoke execute on function {schema}.accept(bytea, text, text, float8, text, bytea, boolean, bytea, jsonb) from public;
