-- get_instance: one row, every column.
select id, fsm, fsm_version, step, status::text as status, state::text as state, result::text as result,
       queue, priority, partition_key, eligible_at, attempt, crashes, max_crashes, last_error,
       locked_by, lease_expires_at, fence, awaits, await_deadline, children_pending, spawn_round, join_round,
       parent_id, child_round, child_index, unique_key, unique_scope::text[] as unique_scope, unique_guard,
       rate_limit, weight, throttled, concurrency_limit, deadline, retry::text as retry, on_cancel, cancelling,
       cancel_reason, cancel_round, fail_fast, inserted_at, updated_at
from gen_durable
where id = %(id)s
