-- Who may send a signal need not be able to read what it is about. {schema} is the configured schema.

-- Both look at rows that are nobody else's business: whether the saga has ended, and whether it waits. What they name is in
-- {schema} or in pg_catalog. The trigger runs at the COMMIT of whoever has sent the signal, and before Postgres 18 as that role.
alter function {schema}.send_signal(bytea, text, text, bytea, text) security definer set search_path = pg_catalog, pg_temp;
alter function {schema}.wake() security definer set search_path = pg_catalog, pg_temp;

-- Whoever could send a signal by its own rights still may, and nobody else.
do $$
declare
    may record;
begin
    if not has_function_privilege('public', '{schema}.send_signal(bytea, text, text, bytea, text)', 'execute') then
        return;
    end if;
    revoke execute on function {schema}.send_signal(bytea, text, text, bytea, text) from public;
    for may in
        select case when e.grantee = 0 then 'public' else quote_ident(pg_get_userbyid(e.grantee)) end as role
        from (
            select relacl as acl from pg_class where oid = '{schema}.signal'::regclass
            union all select attacl from pg_attribute where attrelid = '{schema}.signal'::regclass
        ) as given cross join lateral aclexplode(given.acl) as e
        where e.privilege_type = 'INSERT'
        group by 1
    loop
        execute format('grant execute on function {schema}.send_signal(bytea, text, text, bytea, text) to %s', may.role);
    end loop;
end
$$;

-- A trigger fires without that right. With it, somebody could have one of these fire for a table of their own.
revoke execute on function {schema}.wake(), {schema}.redrive_ended(), {schema}.reopen_letter(),
    {schema}.forget_forwards() from public;
