-- list_instances: newest first; a filter that is null does not filter.
-- Paths and values are parallel, and every path must lead to its value.
select g.id, g.fsm, g.fsm_version, g.step, g.status::text as status, g.state::text as state, g.result::text as result,
       g.queue, g.priority, g.partition_key, g.eligible_at, g.attempt, g.crashes, g.max_crashes, g.last_error,
       g.locked_by, g.lease_expires_at, g.fence, g.awaits, g.await_deadline, g.children_pending, g.spawn_round,
       g.join_round, g.parent_id, g.child_round, g.child_index, g.unique_key, g.unique_scope::text[] as unique_scope,
       g.unique_guard, g.rate_limit, g.weight, g.throttled, g.concurrency_limit, g.deadline, g.retry::text as retry,
       g.on_cancel, g.cancelling, g.cancel_reason, g.cancel_round, g.fail_fast, g.inserted_at, g.updated_at
from gen_durable g
where (%(status)s::text is null or g.status::text = %(status)s)
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
order by g.id desc
limit %(limit)s
