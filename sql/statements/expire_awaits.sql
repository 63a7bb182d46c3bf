-- expire_awaits: wake parked instances whose deadline has passed; they find no signal, or children that still live, and
-- know why. A barrier that its deadline opened is no longer one that a failed child opens.
with overdue as (
  select g.id
  from gen_durable g
  where g.status in ('awaiting_signal', 'awaiting_children')
    and g.await_deadline <= statement_timestamp() + %(ahead)s::interval
  order by g.await_deadline
  limit %(limit)s
  for no key update of g skip locked
)
update gen_durable g
set status = 'runnable',
    eligible_at = g.await_deadline,
    await_deadline = null,
    children_pending = 0,
    fail_fast = false,
    updated_at = statement_timestamp()
from overdue
where g.id = overdue.id
returning g.id, g.queue
