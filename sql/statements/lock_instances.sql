-- lock_instances: hold some rows, whatever their status, in the order of their ids, and see how each stands.
-- By id alone: a filter on status would not wait for an outcome under way, and judge the row by what it was before.
select g.id, g.fence, g.status::text as status, g.deadline::text as deadline, g.on_cancel,
       g.cancel_reason is not null as is_cancelling
from gen_durable g
where g.id = any (%(ids)s::bigint[])
order by g.id
for no key update of g
