-- count_old: how many instances gc would delete now, in all its passes.
-- What has a child that stays, stays itself, and so does whatever is above it.
with recursive judged as (
  select g.id, g.parent_id,
         g.status in ('done', 'failed', 'cancelled')
           and g.updated_at < statement_timestamp() + %(ahead)s::interval - %(older_than)s::interval
           and (g.parent_id is null
                or (select p.status from gen_durable p where p.id = g.parent_id) in ('done', 'failed', 'cancelled')) as is_old
  from gen_durable g
), kept as (
  select parent_id as id from judged where not is_old and parent_id is not null
  union
  select above.parent_id from kept join gen_durable above on above.id = kept.id where above.parent_id is not null
)
select count(*) as count
from judged
where is_old and not exists (select from kept where kept.id = judged.id)
