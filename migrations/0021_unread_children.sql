-- A child whose message is put aside unread has ended (L66). {schema} is the configured schema.

-- In the commit of the dead letter, whoever writes it. There is no record of such a message, and nobody runs it again, so
-- those who have started the saga would wait for ever. Its record says that it failed; nothing begins under its key any more.
-- Under the lock of a claim (J1): what has begun, or begins meanwhile under a message that can be read, is left alone.
create function {schema}.child_unread() returns trigger language plpgsql set enable_seqscan = off as $$
declare
    app text := substr(new.source, 11, greatest(0, length(new.source) - 11 - length(new.handler)));
    given text;
    tenant text;
    child bytea;
    id integer;
    started record;
begin
    if new.source <> 'postgres:~' || app || '/' || new.handler then
        return null;
    end if;
    begin
        given := convert_from(new.delivered, 'UTF8')::json ->> 'message_id';
        tenant := convert_from(new.headers, 'UTF8')::json ->> 'idemconsumer-tenant';
    exception when data_exception then  -- headers that cannot be a child's
        return null;
    end;
    child := {schema}.saga_key(app, new.handler, given, tenant);
    perform pg_advisory_xact_lock(('x' || encode(substring(child for 8), 'hex'))::bit(64)::bigint);
    if not exists (select from {schema}.child as c where c.key = child and not c.ended)
       or exists (select from {schema}.record as r where r.key = child) then
        return null;
    end if;
    insert into {schema}.scope (name) values ({schema}.saga_scope(app, new.handler, tenant))
    on conflict (name) do update set name = excluded.name
    returning scope.id into id;
    insert into {schema}.record (key, scope_id, state, changed_at) values (child, id, 4, clock_timestamp());
    insert into {schema}.result (key, body, content_type)
    values (child, convert_to(json_build_object('code', 'dead_letter', 'body',
        json_build_object('id', new.id, 'reason', new.reason, 'error', new.error))::text, 'UTF8'), 'application/json');
    for started in
        select c.parent from {schema}.child as c where c.key = child and not c.ended order by c.parent
    loop
        update {schema}.child as c set ended = true where c.parent = started.parent and c.key = child;
    end loop;
    return null;
end
$$;

create trigger child_unread after insert on {schema}.dead_letter
    for each row when (new.key is null and new.reason <> 'conflict' and starts_with(new.source, 'postgres:~'))
    execute function {schema}.child_unread();
