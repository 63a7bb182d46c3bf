-- find_siblings: of which partition keys is another row executing than the one named beside it?
-- Asked by whoever has just taken the keys' locks: two claims can cross, and a step whose session was killed has lost
-- its lock but not its claim. Until that one is reaped, no sibling may start.
select t.key
from unnest(%(keys)s::text[], %(ids)s::bigint[]) as t (key, id)
where (select true
       from gen_durable g
       where g.status = 'executing' and g.partition_key = t.key and g.id <> t.id
       limit 1)
