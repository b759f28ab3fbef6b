-- A saga's transaction step begins and ends in one round trip each, with BEGIN and with COMMIT.
--
-- Functions, so that their plans are kept: both are sent as text. Planned while a table is empty they would read all of it
-- for ever, but for enable_seqscan (G5).

-- Marks the transaction, locks the saga's row and inserts the step, before the step's own first statement. The lock is
-- held to COMMIT (L2); waiting for it may find the row changed, and then its new version is what is asked. The checkpoint
-- comes first, so that a COMMIT inside the step fails at the guard (L3). Null: the saga has another owner or another
-- phase. 0: the step has come to its end already. Else its attempt.
create function {schema}.begin_step(mark text, lock_timeout text, key bytea, token bigint, worker bigint, phase smallint,
    name text, kind smallint, state smallint, has_undo boolean)
returns integer language plpgsql set enable_seqscan = off as $$
#variable_conflict use_column
declare
    begun integer;
begin
    perform set_config('idemconsumer.open', mark, true), set_config('lock_timeout', begin_step.lock_timeout, true);
    perform 1 from {schema}.saga as s
    where s.key = begin_step.key and s.token = begin_step.token and s.worker = begin_step.worker
      and s.state = begin_step.phase
    for share;
    if not found then
        return null;
    end if;
    insert into {schema}.step (key, name, kind, state, has_undo, token, started_at)
    values (begin_step.key, begin_step.name, begin_step.kind, begin_step.state, begin_step.has_undo, begin_step.token,
        clock_timestamp())
    on conflict (key, name) do update
    set state = excluded.state, token = excluded.token, attempt = step.attempt + 1,
        undo_at = case when excluded.state = 4 then coalesce(step.undo_at, excluded.started_at) end
    where (step.state, excluded.state) in ((1, 1), (2, 4), (4, 4))
    returning step.attempt into begun;
    return coalesce(begun, 0);
end
$$;

-- By the transaction that began the step, and sealed with it. Backward (5) only the undo is noted.
create function {schema}.finish_step(mark text, key bytea, name text, state smallint, overlapped boolean, token bigint,
    output bytea, content_type text)
returns void language plpgsql set enable_seqscan = off as $$
begin
    update {schema}.step as s
    set state = finish_step.state, overlapped = s.overlapped or finish_step.overlapped, token = finish_step.token,
        position = coalesce(s.position, nextval('{schema}.saga_token')),
        output = coalesce(s.output, finish_step.output),
        content_type = coalesce(s.content_type, finish_step.content_type),
        finished_at = coalesce(s.finished_at, clock_timestamp()),
        undone_at = case when finish_step.state = 5 then clock_timestamp() end
    where s.key = finish_step.key and s.name = finish_step.name;
    perform {schema}.seal(mark);
end
$$;
