-- Scopes that no record refers to are pruned (R30). {schema} is the configured schema.

-- `seen_at`: when a pass has last seen a record of it, to half a day. `retired_at`: since when none has, and none is claimed.
alter table {schema}.scope add column seen_at timestamptz not null default now(), add column retired_at timestamptz;

-- Whoever names a scope uses it, workers of earlier versions too. Passes change neither column.
create function {schema}.use_scope() returns trigger language plpgsql as $$
begin
    new.retired_at := null;
    new.seen_at := clock_timestamp();
    return new;
end
$$;

create trigger used before update of name, retain on {schema}.scope
    for each row when (old.retired_at is not null) execute function {schema}.use_scope();

-- Brings back those that are retired, and refuses those that are gone.
create function {schema}.use_scopes(scopes int[]) returns void language plpgsql as $$
begin
    update {schema}.scope as s set retired_at = null, seen_at = clock_timestamp()
    where s.id in (
        select u.id from {schema}.scope as u
        where u.id = any (use_scopes.scopes) and u.retired_at is not null order by u.id for update
    );
    if exists (
        select from unnest(use_scopes.scopes) as c (id)
        where not exists (select from {schema}.scope as s where s.id = c.id offset 0)
    ) then
        raise exception 'the scope of a claim has been pruned' using errcode = 'IC003';
    end if;
end
$$;

-- As `claim` in 0011, for whoever has looked the scopes up within half a day: then none of them can go before its record is
-- there, and looking at them each time would be a tenth of a claim.
create function {schema}.claim_met(
    keys bytea[], scopes int[], fingerprints bytea[], canonicals bytea[], state smallint
) returns table (key bytea, found smallint, fingerprint bytea, body bytea, content_type text, canonical bytea)
language plpgsql as $$
#variable_conflict use_column
declare
    claimed bytea[];
begin
    with inserted as (
        insert into {schema}.record (key, scope_id, state, fingerprint, canonical, changed_at)
        select c.key, c.scope_id, claim_met.state, c.fingerprint, c.canonical, clock_timestamp()
        from unnest(claim_met.keys, claim_met.scopes, claim_met.fingerprints, claim_met.canonicals)
            as c (key, scope_id, fingerprint, canonical)
        where pg_try_advisory_xact_lock(('x' || encode(substring(c.key for 8), 'hex'))::bit(64)::bigint)
        on conflict do nothing
        returning record.key
    )
    select array_agg(inserted.key) into claimed from inserted;
    if cardinality(claimed) = cardinality(claim_met.keys) then
        return;
    end if;
    return query
        select w.key, r.state, r.fingerprint, s.body, s.content_type, r.canonical
        from unnest(claim_met.keys) as w (key)
        left join lateral (
            select state, fingerprint, canonical from {schema}.record where key = w.key offset 0
        ) as r on true
        left join lateral (select body, content_type from {schema}.result where key = w.key offset 0) as s on true
        where claimed is null or w.key <> all (claimed);
end
$$;

-- For sagas, and as in 0011 and 0004 for workers of earlier versions, which remember ids for ever. The scopes are looked at
-- after the insert, in a later statement: either this sees that one is retired, or its record is there when those of a
-- retired one are looked for.
create or replace function {schema}.claim(
    keys bytea[], scopes int[], fingerprints bytea[], canonicals bytea[], state smallint
) returns table (key bytea, found smallint, fingerprint bytea, body bytea, content_type text, canonical bytea)
language plpgsql as $$
begin
    return query
        select * from {schema}.claim_met(claim.keys, claim.scopes, claim.fingerprints, claim.canonicals, claim.state);
    if not claim.scopes <@ array(
        select s.id from {schema}.scope as s where s.id = any (claim.scopes) and s.retired_at is null
    ) then
        perform {schema}.use_scopes(claim.scopes);
    end if;
end
$$;

create or replace function {schema}.claim(keys bytea[], scopes int[], fingerprints bytea[], state smallint)
returns table (key bytea, found smallint, fingerprint bytea, body bytea, content_type text)
language sql as $$
    select c.key, c.found, c.fingerprint, c.body, c.content_type
    from {schema}.claim(keys, scopes, fingerprints, array_fill(null::bytea, array[cardinality(keys)]), state) as c
$$;
