-- find_children: the children of some instances that live, or may have children themselves.
-- Runs after the parents were locked and cancelled, in the same transaction: a Spawn under way is either seen, or stale.
select c.id
from gen_durable c
join gen_durable p on p.id = c.parent_id
where c.parent_id = any (%(ids)s::bigint[])
  and (p.cancel_round is null or c.child_round <= p.cancel_round)
  and (c.status in ('runnable', 'executing', 'awaiting_signal', 'awaiting_children') or c.spawn_round > 0)
order by c.id
