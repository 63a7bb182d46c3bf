-- gc: delete instances that ended long ago, walking the primary key from where the last batch stopped.
-- A child stays as long as its parent lives: the parent may still read it.
-- A parent stays until its children are gone, so that its deletion has no child's row to change, and with the rows
-- skipped that somebody has locked, nothing to wait for. A family goes in as many passes as it has generations.
with old as (
  select g.id
  from gen_durable g
  where g.id > %(after)s
    and g.status in ('done', 'failed', 'cancelled')
    and g.updated_at < statement_timestamp() + %(ahead)s::interval - %(older_than)s::interval
    and (g.parent_id is null
         or (select p.status from gen_durable p where p.id = g.parent_id) in ('done', 'failed', 'cancelled'))
    and (select c.id from gen_durable c where c.parent_id = g.id limit 1) is null
  order by g.id
  limit %(limit)s
  for update of g skip locked
)
delete from gen_durable g
using old
where g.id = old.id
returning g.id
