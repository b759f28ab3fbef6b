-- Two messages under one key are the same if their bytes are, or else their JSON values (R26).
--
-- `fingerprint` stays what it was, the hash of the bytes: workers of both versions compare it. `canonical` is null where
-- an older version has written the record, and where the handler compares something else.
alter table {schema}.record add column canonical bytea;  -- the first 16 bytes of SHA-256 of the payload's canonical JSON

-- As `claim` in 0004, with `canonicals`. That one stays for older workers.
create function {schema}.claim(keys bytea[], scopes int[], fingerprints bytea[], canonicals bytea[], state smallint)
returns table (key bytea, found smallint, fingerprint bytea, body bytea, content_type text, canonical bytea)
language plpgsql as $$
#variable_conflict use_column
declare
    claimed bytea[];
begin
    with inserted as (
        insert into {schema}.record (key, scope_id, state, fingerprint, canonical, changed_at)
        select c.key, c.scope_id, claim.state, c.fingerprint, c.canonical, clock_timestamp()
        from unnest(claim.keys, claim.scopes, claim.fingerprints, claim.canonicals)
            as c (key, scope_id, fingerprint, canonical)
        where pg_try_advisory_xact_lock(('x' || encode(substring(c.key for 8), 'hex'))::bit(64)::bigint)
        on conflict do nothing
        returning record.key
    )
    select array_agg(inserted.key) into claimed from inserted;
    if cardinality(claimed) = cardinality(claim.keys) then
        return;
    end if;
    return query
        select w.key, r.state, r.fingerprint, s.body, s.content_type, r.canonical
        from unnest(claim.keys) as w (key)
        left join lateral (
            select state, fingerprint, canonical from {schema}.record where key = w.key offset 0
        ) as r on true
        left join lateral (select body, content_type from {schema}.result where key = w.key offset 0) as s on true
        where claimed is null or w.key <> all (claimed);
end
$$;
