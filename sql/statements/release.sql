-- release: hand back claims whose step never started or was interrupted; attempt and place in the queue stay as they were.
with held as (
  select g.id
  from gen_durable g
  join unnest(%(ids)s::bigint[], %(fences)s::bigint[]) as t (id, fence) on t.id = g.id
  where g.fence = t.fence and g.status::text = 'executing'
  order by g.id
  for no key update of g
)
update gen_durable g
set status = 'runnable',
    locked_by = null,
    lease_expires_at = null,
    updated_at = statement_timestamp()
from held
where g.id = held.id
returning g.id
