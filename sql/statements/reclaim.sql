-- reclaim: put back what a dead worker of our name still holds, without waiting for its leases to run out.
-- A decayed lease is required: containers may share a name, and a living worker's leases are fresh. How long a lease
-- of its holder is, the holder's row tells: another worker of our name may have shorter ones than we do.
-- Compared by left, not like: a name may contain wildcards. Attempts stay; the death counts as a crash, and a row
-- whose crash budget that would spend is left to the reaper, who knows how to end it.
with decayed as (
  select g.id
  from gen_durable g
  left join workers w on w.id = g.locked_by
  where g.status = 'executing'
    and g.lease_expires_at < statement_timestamp() + least(%(remaining)s::interval, (w.expires_at - w.beat_at) / 3)
    and left(g.locked_by, length(%(prefix)s)) = %(prefix)s
    and (g.crashes + 1 < g.max_crashes or g.max_crashes is null)
  order by g.id
  limit %(limit)s
  for no key update of g skip locked
)
update gen_durable g
set status = 'runnable',
    locked_by = null,
    lease_expires_at = null,
    fence = g.fence + 1,
    crashes = g.crashes + 1,
    updated_at = statement_timestamp()
from decayed
where g.id = decayed.id
returning g.id
