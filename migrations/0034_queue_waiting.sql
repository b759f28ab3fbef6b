-- How much waits in each Postgres queue, for those who scale workers by it. {schema} is the configured schema.

-- What can run, what is in hand included, up to 10,000 of each queue; a queue of which nothing is there has no row. Cheap
-- however many rows there are: names are found by skipping through the indexes. Who reads it needs no right on the tables.
create view {schema}.queue_waiting (name, waiting) as
with recursive queued (name) as (
    (select name from {schema}.queue order by name limit 1)
    union all
    select (select q.name from {schema}.queue as q where q.name > n.name order by q.name limit 1)
    from queued as n where n.name is not null
), delayed (name) as (
    (select name from {schema}.delayed order by name limit 1)
    union all
    select (select d.name from {schema}.delayed as d where d.name > n.name order by d.name limit 1)
    from delayed as n where n.name is not null
)
select n.name,
    (select count(*) from (select from {schema}.queue as q where q.name = n.name limit 10000) as q)
    + (select count(*) from (
        select from {schema}.delayed as d
        where d.name = n.name and d.due_at <= (select clock_timestamp()) limit 10000) as d)
from (select name from queued union select name from delayed) as n
where n.name is not null;
