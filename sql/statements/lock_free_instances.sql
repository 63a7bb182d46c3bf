-- lock_free_instances: lock_instances, but of the rows that nobody holds: never waits.
-- Whoever takes a parent together with its children must not wait for them: a child that ends waits for its parent.
select g.id, g.fence, g.status::text as status, g.deadline::text as deadline, g.on_cancel,
       g.cancel_reason is not null as is_cancelling
from gen_durable g
where g.id = any (%(ids)s::bigint[])
order by g.id
for no key update of g skip locked
