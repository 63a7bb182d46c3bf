-- load_children: the children of some instances, in the order in which they were spawned.
select c.id, c.parent_id, c.fsm, c.status::text as status, c.state::text as state, c.result::text as result,
       c.last_error, c.child_round as round, c.child_index as index
from gen_durable c
where c.parent_id = any (%(ids)s::bigint[])
order by c.parent_id, c.child_round, c.child_index, c.id
