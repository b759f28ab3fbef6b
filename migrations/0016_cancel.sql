-- A request to cancel a running saga. {schema} is the configured schema.

-- L50. Null: none; true: its finished steps are to be undone. Null again once that is decided by UNDOING.
alter table {schema}.saga add column cancel boolean;

-- L51. Whether a worker knows of such requests. False: it is of an earlier version of idemconsumer.
alter table {schema}.worker add column cancels boolean not null default false;

-- Such a worker cannot take a saga that is to be cancelled: its update leaves the row out. For all other sagas this is one
-- condition, and no call.
create function {schema}.keep_from_earlier() returns trigger language plpgsql as $$
begin
    if exists (select from {schema}.worker where id = new.worker and cancels) then
        return new;
    end if;
    return null;
end
$$;

create trigger cancelled before update of worker on {schema}.saga
    for each row when (new.cancel is not null and new.worker is not null)
    execute function {schema}.keep_from_earlier();
