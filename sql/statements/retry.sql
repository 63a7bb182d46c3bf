-- retry: let a failed or cancelled instance run again, at the step it ended in, from its first attempt.
-- A deadline that has passed counts no more, or it would end at once.
-- A parent that still waits for this child's round has counted it as ended: it must count it once more.
-- One that has moved on waits for nobody; finish leaves it alone then, as for any child of an earlier round.
-- Locks child before parent, as finish does.
with again as (
  update gen_durable g
  set status = 'runnable',
      result = null,
      attempt = 0,
      crashes = 0,
      cancelling = false,
      cancel_reason = null,
      cancel_round = null,
      deadline = case when g.deadline > statement_timestamp() + %(ahead)s::interval then g.deadline end,
      eligible_at = statement_timestamp() + %(ahead)s::interval,
      updated_at = statement_timestamp()
  where g.id = %(id)s and g.status::text in ('failed', 'cancelled')
  returning g.id, g.parent_id, g.child_round
), waiting as (
  select p.id
  from gen_durable p
  join again on again.parent_id = p.id and again.child_round = p.join_round
  where p.status = 'awaiting_children'
  for no key update of p
), counted as (
  update gen_durable p
  set children_pending = p.children_pending + 1,
      updated_at = statement_timestamp()
  from waiting
  where p.id = waiting.id
)
select id from again
