-- finish: Done and Stop. Ended for good: the inbox is dropped and the parent's barrier counts it.
-- Both kinds in one statement, so that parents are locked in one order whatever the mix.
-- Every rider hangs on the rows that the fence let through; a stale outcome therefore joins nobody.
-- A parent is joined only while it waits for the very round that this child belongs to.
with ended as (
  update gen_durable g
  set status = t.status::durable_status,
      result = t.result::jsonb,
      last_error = t.error,
      crashes = t.crashes,
      awaits = null,
      await_deadline = null,
      join_round = case when t.status = 'failed' then g.join_round end, -- a retried step joins the same children
      locked_by = null,
      lease_expires_at = null,
      updated_at = statement_timestamp()
  from unnest(%(ids)s::bigint[], %(fences)s::bigint[], %(statuses)s::text[], %(results)s::text[],
              %(errors)s::text[], %(crashes)s::int[]) as t (id, fence, status, result, error, crashes)
  where g.id = t.id and g.fence = t.fence and g.status::text = 'executing'
  returning g.id, g.parent_id, g.child_round
), emptied as (
  delete from signals s
  using ended
  where s.target_id = ended.id
), arrived as (
  select parent_id, child_round, count(*) as children
  from ended
  where parent_id is not null
  group by parent_id, child_round
), waiting as (
  select p.id, arrived.children
  from gen_durable p
  join arrived on arrived.parent_id = p.id and arrived.child_round = p.join_round
  where p.status = 'awaiting_children'
  order by p.id
  for no key update of p
), joined as (
  update gen_durable p
  set children_pending = p.children_pending - waiting.children,
      status = case when p.children_pending - waiting.children <= 0 then 'runnable' else p.status end,
      eligible_at = case when p.children_pending - waiting.children <= 0
                         then statement_timestamp() + %(ahead)s::interval else p.eligible_at end,
      updated_at = statement_timestamp()
  from waiting
  where p.id = waiting.id
  returning p.id, p.queue, p.status
)
select ended.id, (select joined.queue from joined where joined.id = ended.parent_id and joined.status = 'runnable') as wakes
from ended
