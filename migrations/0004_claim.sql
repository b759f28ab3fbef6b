-- The claim of a whole group, in one round trip with BEGIN.
--
-- One atomic insert (R3). The advisory lock comes first, in the same statement: without it the insert would block behind
-- an uncommitted rival and pin the connection (J1). Returns what was not inserted: its record as a second statement reads
-- it, with a snapshot of its own, or nulls where a rival holds the key. Joined claims are written in their final state,
-- COMPLETED, since nobody sees them before the commit (J2).
--
-- A function, so that its plans are kept: the statement itself is sent as text, with BEGIN. LATERAL ... OFFSET 0 keeps
-- the reading an index lookup for each key even when it was planned while the table was empty (G5).
create function {schema}.claim(keys bytea[], scopes int[], fingerprints bytea[], state smallint)
returns table (key bytea, found smallint, fingerprint bytea, body bytea, content_type text)
language plpgsql as $$
#variable_conflict use_column
declare
    claimed bytea[];
begin
    with inserted as (
        insert into {schema}.record (key, scope_id, state, fingerprint, changed_at)
        select c.key, c.scope_id, claim.state, c.fingerprint, clock_timestamp()
        from unnest(claim.keys, claim.scopes, claim.fingerprints) as c (key, scope_id, fingerprint)
        where pg_try_advisory_xact_lock(('x' || encode(substring(c.key for 8), 'hex'))::bit(64)::bigint)
        on conflict do nothing
        returning record.key
    )
    select array_agg(inserted.key) into claimed from inserted;
    if cardinality(claimed) = cardinality(claim.keys) then
        return;
    end if;
    return query
        select w.key, r.state, r.fingerprint, s.body, s.content_type
        from unnest(claim.keys) as w (key)
        left join lateral (select state, fingerprint from {schema}.record where key = w.key offset 0) as r on true
        left join lateral (select body, content_type from {schema}.result where key = w.key offset 0) as s on true
        where claimed is null or w.key <> all (claimed);
end
$$;
