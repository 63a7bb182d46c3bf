-- gc: delete instances that ended long ago, walking the primary key from where the last batch stopped.
-- A child stays as long as its parent lives: the parent may still read it.
with old as (
  select g.id
  from gen_durable g
  where g.id > %(after)s
    and g.status in ('done', 'failed')
    and g.updated_at < statement_timestamp() + %(ahead)s::interval - %(older_than)s::interval
    and (g.parent_id is null
         or (select p.status from gen_durable p where p.id = g.parent_id) in ('done', 'failed'))
  order by g.id
  limit %(limit)s
  for update of g skip locked
)
delete from gen_durable g
using old
where g.id = old.id
returning g.id
