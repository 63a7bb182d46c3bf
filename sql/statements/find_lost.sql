-- find_lost: those of some claims that hold no longer: ended from outside, reaped, or claimed anew.
-- Reads without a lock: a row that is merely locked by somebody is not lost.
select t.id, t.fence
from unnest(%(ids)s::bigint[], %(fences)s::bigint[]) as t (id, fence)
where not exists (
  select from gen_durable g where g.id = t.id and g.fence = t.fence and g.status::text = 'executing'
)
