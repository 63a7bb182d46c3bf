-- list_ids: which instances match every filter, in the order of their ids, a page at a time.
-- A filter that is null does not filter; paths and values are parallel, and every path must lead to its value.
select g.id
from gen_durable g
where g.id > %(after)s
  and g.status::text = any (%(statuses)s::text[])
  and (%(fsm)s::text is null or g.fsm = %(fsm)s)
  and (%(queue)s::text is null or g.queue = %(queue)s)
  and (%(step)s::text is null or g.step = %(step)s)
  and (%(parent)s::bigint is null or g.parent_id = %(parent)s)
  and (%(older_than)s::interval is null or g.updated_at < statement_timestamp() - %(older_than)s::interval)
  and not exists (
    select from unnest(%(paths)s::text[], %(values)s::text[]) as wanted (path, value)
    where jsonb_build_object('state', g.state, 'result', g.result) #>>
          array(select jsonb_array_elements_text(wanted.path::jsonb)) is distinct from wanted.value
  )
order by g.id
limit %(limit)s
