-- count_old: how many instances gc would delete now.
-- The children of an ended parent count too, as gc takes them once they are old enough themselves.
select count(*) as count
from gen_durable g
where g.status in ('done', 'failed')
  and g.updated_at < statement_timestamp() + %(ahead)s::interval - %(older_than)s::interval
  and (g.parent_id is null
       or (select p.status from gen_durable p where p.id = g.parent_id) in ('done', 'failed'))
