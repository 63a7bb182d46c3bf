-- find_children: the children of some instances that live, or may have children themselves.
-- Runs after lock_instances in the same transaction: a Spawn under way is either seen, or stale.
select c.id
from gen_durable c
where c.parent_id = any (%(ids)s::bigint[])
  and (c.status in ('runnable', 'executing', 'awaiting_signal', 'awaiting_children') or c.spawn_round > 0)
order by c.id
