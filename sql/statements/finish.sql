-- finish: Done and Stop. Ended for good: the inbox is dropped and the parent's barrier counts it.
-- Both kinds in one statement, so that parents are locked in one order whatever the mix.
-- Every rider hangs on the rows that the fence let through; a stale outcome therefore joins nobody.
-- A parent is joined only while it waits for the very round that this child belongs to. If it is to fail fast, a child
-- that did not end well opens its barrier; whoever claims the parent then cancels those that are left.
with ended as (
  update gen_durable g
  set status = t.status::durable_status,
      result = t.result::jsonb,
      last_error = t.error,
      crashes = t.crashes,
      awaits = null,
      await_deadline = null,
      join_round = case when t.status <> 'done' then g.join_round end, -- a retried step joins the same children
      children_pending = 0,
      fail_fast = false,
      cancelling = false,
      locked_by = null,
      lease_expires_at = null,
      updated_at = statement_timestamp()
  from unnest(%(ids)s::bigint[], %(fences)s::bigint[], %(statuses)s::text[], %(results)s::text[],
              %(errors)s::text[], %(crashes)s::int[]) as t (id, fence, status, result, error, crashes)
  where g.id = t.id and g.fence = t.fence and g.status::text = 'executing'
  returning g.id, g.parent_id, g.child_round, g.status::text as status
), emptied as (
  delete from signals s
  using ended
  where s.target_id = ended.id
), arrived as (
  select parent_id, child_round, count(*) as children, bool_or(status <> 'done') as is_any_bad
  from ended
  where parent_id is not null
  group by parent_id, child_round
), waiting as (
  select p.id,
         case when p.fail_fast and arrived.is_any_bad then 0
              else greatest(p.children_pending - arrived.children, 0) end as pending
  from gen_durable p
  join arrived on arrived.parent_id = p.id and arrived.child_round = p.join_round
  where p.status = 'awaiting_children'
  order by p.id
  for no key update of p
), joined as (
  update gen_durable p
  set children_pending = waiting.pending,
      status = case when waiting.pending = 0 then 'runnable' else p.status end,
      eligible_at = case when waiting.pending = 0
                         then statement_timestamp() + %(ahead)s::interval else p.eligible_at end,
      await_deadline = case when waiting.pending > 0 then p.await_deadline end,
      updated_at = statement_timestamp()
  from waiting
  where p.id = waiting.id
  returning p.id, p.queue, p.status
)
select ended.id, (select joined.queue from joined where joined.id = ended.parent_id and joined.status = 'runnable') as wakes
from ended
