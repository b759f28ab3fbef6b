-- The guard and the seal name what they call (J17): a handler may put a schema of its own before pg_catalog.
--
-- So do their comparisons, and IS DISTINCT FROM cannot. No SET search_path: it would cost at each call.

create or replace function {schema}.guard() returns trigger language plpgsql as $$
begin
    if coalesce(pg_catalog.current_setting('idemconsumer.sealed', true), '') operator(pg_catalog.=) ''
       or coalesce(pg_catalog.current_setting('idemconsumer.open', true), '')
          operator(pg_catalog.<>) pg_catalog.current_setting('idemconsumer.sealed', true) then
        raise exception 'this transaction was committed by somebody other than the engine'
            using errcode = 'IC001', hint = 'A handler must not end the transaction it runs in.';
    end if;
    return null;
end
$$;

create or replace function {schema}.seal(token text) returns void language plpgsql as $$
begin
    if coalesce(pg_catalog.current_setting('idemconsumer.open', true), '') operator(pg_catalog.<>) token then
        raise exception 'the transaction that the engine opened was ended before its seal'
            using errcode = 'IC001', hint = 'A handler must not end the transaction it runs in.';
    end if;
    if pg_catalog.current_setting('synchronous_commit') operator(pg_catalog.=) 'off' then
        raise exception 'synchronous_commit is off: a crash would lose what has been acknowledged'
            using errcode = 'IC002';
    end if;
    perform pg_catalog.set_config('idemconsumer.sealed', token, true);
end
$$;
