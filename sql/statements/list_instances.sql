-- list_instances: newest first; a filter that is null does not filter.
select id, fsm, fsm_version, step, status::text as status, state::text as state, result::text as result,
       queue, priority, partition_key, eligible_at, attempt, crashes, max_crashes, last_error,
       locked_by, lease_expires_at, fence, awaits, await_deadline, children_pending, spawn_round, join_round,
       parent_id, child_round, child_index, unique_key, unique_scope::text[] as unique_scope, unique_guard,
       inserted_at, updated_at
from gen_durable
where (%(status)s::text is null or status::text = %(status)s)
  and (%(fsm)s::text is null or fsm = %(fsm)s)
  and (%(queue)s::text is null or queue = %(queue)s)
  and (%(step)s::text is null or step = %(step)s)
order by id desc
limit %(limit)s
