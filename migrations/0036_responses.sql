-- Results that are responses, and records that expire (R36, R37). {schema} is the configured schema.

-- Null where the result is none of HTTP. `headers`: a JSON list of names and values in their order, without the content type;
-- bytea, since jsonb cannot hold NUL.
alter table {schema}.result add column status smallint, add column headers bytea;

-- From then on a record that is COMPLETED or FAILED counts as none. Null: it counts as long as it is there.
alter table {schema}.record add column expires_at timestamptz;

-- It expires so long after it has ended, whoever ends it; workers of earlier versions too.
create function {schema}.expire_later() returns trigger language plpgsql as $$
begin
    new.expires_at := old.expires_at + (new.changed_at - old.changed_at);
    return new;
end
$$;

create trigger expires before update of changed_at on {schema}.record
    for each row when (old.expires_at is not null) execute function {schema}.expire_later();

-- As `claim` and `claim_met` in 0035, which stay for workers of earlier versions. `met`: the scopes were looked up within half
-- a day. `expires`: for how many seconds the record will count once it is final; a null for one that does not expire, or for
-- all of them.
--
-- What has expired stands in the way of the insert, is deleted under the lock that the first statement has taken, and the
-- insert is repeated; so a claim that finds its keys free pays nothing for it. EXECUTE plans that each time: a plan from when
-- the table was small would scan all of it (G5).
create function {schema}.claim_keys(
    keys bytea[], scopes int[], fingerprints bytea[], canonicals bytea[], expires float8[], state smallint, met boolean
) returns table (
    key bytea, found smallint, fingerprint bytea, body bytea, content_type text, canonical bytea, status smallint,
    headers bytea
) language plpgsql as $$
#variable_conflict use_column
declare
    claimed bytea[];
    expired bytea[];
begin
    for each in 1..2 loop
        with inserted as (
            insert into {schema}.record (key, scope_id, state, fingerprint, canonical, changed_at, expires_at)
            select c.key, c.scope_id, claim_keys.state, c.fingerprint, c.canonical, clock_timestamp(),
                clock_timestamp() + make_interval(secs => c.expires)
            from unnest(claim_keys.keys, claim_keys.scopes, claim_keys.fingerprints, claim_keys.canonicals,
                    claim_keys.expires) as c (key, scope_id, fingerprint, canonical, expires)
            where (expired is null or c.key = any (expired))
              and pg_try_advisory_xact_lock(('x' || encode(substring(c.key for 8), 'hex'))::bit(64)::bigint)
            on conflict do nothing
            returning record.key
        )
        select claimed || array_agg(inserted.key) into claimed from inserted;
        exit when cardinality(claimed) = cardinality(claim_keys.keys) or expired is not null;
        expired := array(
            select w.key from unnest(claim_keys.keys) as w (key)
            cross join lateral (
                select from {schema}.record as r
                where r.key = w.key and r.expires_at <= clock_timestamp() and r.state in (3, 4) offset 0
            ) as old
            where claimed is null or w.key <> all (claimed)
        );
        exit when cardinality(expired) = 0;
        execute $sql$
            with gone as (
                delete from {schema}.record where key = any ($1) and expires_at <= clock_timestamp() and state in (3, 4)
                    and pg_try_advisory_xact_lock(('x' || encode(substring(key for 8), 'hex'))::bit(64)::bigint)
                returning key
            ), gathered as (
                select array_agg(key) as keys from gone
            ), results as (
                delete from {schema}.result where key = any ((select keys from gathered)::bytea[])
            ), histories as (
                delete from {schema}.history where key = any ((select keys from gathered)::bytea[])
            ), signals as (
                delete from {schema}.signal where key = any ((select keys from gathered)::bytea[])
            ), children as (
                delete from {schema}.child where parent = any ((select keys from gathered)::bytea[])
            ), steps as (
                delete from {schema}.step where key = any ((select keys from gathered)::bytea[])
            )
            select coalesce(keys, '{{}}') from gathered
        $sql$ into expired using expired;
    end loop;
    if not met and not claim_keys.scopes <@ array(
        select s.id from {schema}.scope as s where s.id = any (claim_keys.scopes) and s.retired_at is null
    ) then
        perform {schema}.use_scopes(claim_keys.scopes);
    end if;
    if cardinality(claimed) = cardinality(claim_keys.keys) then
        return;
    end if;
    -- One that has expired and could not be deleted is a rival's.
    return query
        select w.key, r.state, r.fingerprint, s.body, s.content_type, r.canonical, s.status, s.headers
        from unnest(claim_keys.keys) as w (key)
        left join lateral (
            select state, fingerprint, canonical from {schema}.record
            where key = w.key and (expires_at is null or expires_at > clock_timestamp() or state not in (3, 4)) offset 0
        ) as r on true
        left join lateral (
            select body, content_type, status, headers from {schema}.result where key = w.key offset 0
        ) as s on true
        where claimed is null or w.key <> all (claimed);
end
$$;
