-- lock_claims: lock, in id order, those of a batch of claims that still hold; the others are stale.
-- First statement of every commit: whatever kinds of outcome follow, rows are locked in one order.
-- The status is compared as text so that no partial index can tempt the planner away from the primary key.
select g.id
from gen_durable g
join unnest(%(ids)s::bigint[], %(fences)s::bigint[]) as t (id, fence) on t.id = g.id
where g.fence = t.fence and g.status::text = 'executing'
order by g.id
for no key update of g
