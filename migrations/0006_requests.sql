-- Requests whose effects are in no transaction of ours, while they run (H20 to H24). {schema} is the configured schema.

-- Whoever ends the request locks this row by its token first, and deletes it. A row whose worker has no good lease is
-- anybody's to take, with a token that is greater.
create table {schema}.request (
    key         bytea primary key,
    scope_id    integer not null,
    token       bigint not null,
    worker      bigint not null,
    again       boolean not null default false,
    started_at  timestamptz not null
);

comment on table {schema}.request is 'Requests that run, each beside a record that is PROCESSING';
comment on column {schema}.request.token is 'Fencing token, which grows with every owner';
comment on column {schema}.request.worker is 'Of the lease: a row of `worker`, which may be gone';
comment on column {schema}.request.again is 'A former owner was lost, and may have run it';

-- A claim and its end. Functions, as in 0005, so that their plans are kept: both are sent as text, with BEGIN and COMMIT.

-- H20. The record and the row in one commit, by the claim that messages and sagas make. `claims` is one. One row: with our
-- token, or with what was found, and then with the row's token if nobody has a good lease for it. None: ours is over,
-- which is looked at here, by the server's clock.
create function {schema}.claim_request(claims {schema}.claim[], owner bigint)
returns table (missed {schema}.recorded, token bigint, free bigint)
language plpgsql set enable_seqscan = off as $$
#variable_conflict use_column
begin
    perform from {schema}.worker where id = owner and until > clock_timestamp();
    if not found then
        return;
    end if;
    return query
        select m, null::bigint, case when s.worker = owner or not s.held then s.token end
        from {schema}.claim(claims, 1::smallint, true) as m
        left join lateral (
            select r.token, r.worker, exists (
                select from {schema}.worker as w
                where w.id = r.worker and w.until >= clock_timestamp() and w.until <= clock_timestamp() + w.lease
            ) as held
            from {schema}.request as r where r.key = m.key offset 0
        ) as s on true;
    if not found then
        return query
            insert into {schema}.request (key, scope_id, token, worker, started_at)
            values (claims[1].key, claims[1].scope_id, nextval('{schema}.saga_token'), owner, clock_timestamp())
            returning null::{schema}.recorded, token, null::bigint;
    end if;
end
$$;

-- H21. The row is locked by its token first, so a former owner finds none, writes nothing, and is told so. When the record
-- expires is moved along by a trigger (R37).
create function {schema}.complete_request(ended bytea, fence bigint, final smallint, response bytea, type text,
    code smallint, sent bytea)
returns boolean language plpgsql set enable_seqscan = off as $$
begin
    delete from {schema}.request where key = ended and token = fence;
    if not found then
        return false;
    end if;
    update {schema}.record set state = final, changed_at = clock_timestamp() where key = ended;
    insert into {schema}.result (key, body, content_type, status, headers) values (ended, response, type, code, sent);
    return true;
end
$$;
