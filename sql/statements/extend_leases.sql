-- extend_leases: heartbeat. Prolong the claims that still hold; answers which those are.
-- Skips a row that somebody has locked, so that one foreign lock never costs the other leases.
with held as (
  select g.id
  from gen_durable g
  join unnest(%(ids)s::bigint[], %(fences)s::bigint[]) as t (id, fence) on t.id = g.id
  where g.fence = t.fence and g.status::text = 'executing'
  order by g.id
  for no key update of g skip locked
)
update gen_durable g
set lease_expires_at = statement_timestamp() + %(ahead)s::interval + %(lease)s::interval
from held
where g.id = held.id
returning g.id
