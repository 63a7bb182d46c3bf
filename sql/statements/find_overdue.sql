-- find_overdue: live instances whose own deadline has passed, the longest overdue first.
-- Locks nothing: those who end them take the rows that nobody holds, and leave the others to the next sweep.
select g.id, g.queue, g.fsm, g.step, g.deadline::text as deadline
from gen_durable g
where g.status in ('runnable', 'executing', 'awaiting_signal', 'awaiting_children')
  and g.deadline <= statement_timestamp() + %(ahead)s::interval
order by g.deadline
limit %(limit)s
