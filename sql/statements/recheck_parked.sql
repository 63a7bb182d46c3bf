-- recheck_parked: wake what was just parked if a signal it waits for came in before the park.
-- A statement of its own, for a snapshot taken while the row is locked: the delivery that this one misses
-- waits for the lock and then finds the row parked. Either half alone loses the wake-up.
-- Signals that the parking step was shown do not count, or accumulating a pack would spin.
-- The fence still names our claim, so another worker's park is never touched.
update gen_durable g
set status = 'runnable',
    eligible_at = statement_timestamp() + %(ahead)s::interval,
    await_deadline = null,
    updated_at = statement_timestamp()
from unnest(%(ids)s::bigint[], %(fences)s::bigint[]) as t (id, fence)
where g.id = t.id
  and g.fence = t.fence
  and g.status::text = 'awaiting_signal'
  and (select true
       from signals s
       where s.target_id = g.id and s.name = any (g.awaits) and s.id <> all (%(shown)s::bigint[])
       limit 1)
returning g.id, g.queue
