-- find_sibling: is another row of a partition key executing?
-- Asked by whoever has just taken the key's lock: two claims can cross, and a step whose session was killed has lost
-- its lock but not its claim. Until that one is reaped, no sibling may start.
select g.id
from gen_durable g
where g.status = 'executing' and g.partition_key = %(key)s and g.id <> %(id)s
limit 1
