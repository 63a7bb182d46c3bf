-- spawn: Spawn. Children inserted and their parents parked on the barrier, in one commit.
-- Children go in by unique key, as every insert does: two batches sharing new keys never wait for each other in a ring.
-- Only a child that was really inserted counts; none at all means that the barrier is already open.
with parent as (
  select g.id, g.spawn_round + 1 as round, t.step, t.state, t.error, t.timeout, t.fail_fast
  from gen_durable g
  join unnest(%(ids)s::bigint[], %(fences)s::bigint[], %(steps)s::text[], %(states)s::text[],
              %(errors)s::text[], %(timeouts)s::interval[], %(fail_fasts)s::boolean[])
         as t (id, fence, step, state, error, timeout, fail_fast) on t.id = g.id
  where g.fence = t.fence and g.status::text = 'executing'
  order by g.id
  for no key update of g
), child as (
  insert into gen_durable
    (fsm, fsm_version, step, state, queue, priority, partition_key, unique_key, unique_scope, max_crashes,
     eligible_at, rate_limit, weight, concurrency_limit, deadline, retry, on_cancel,
     parent_id, child_round, child_index)
  select c.fsm, c.fsm_version, c.step, c.state::jsonb, c.queue, c.priority, c.partition_key, c.unique_key,
         string_to_array(c.unique_scope, ',')::durable_status[], c.max_crashes,
         coalesce(c.eligible_at, statement_timestamp() + %(ahead)s::interval + c.delay),
         c.rate_limit, coalesce(c.weight, 1), c.concurrency_limit,
         coalesce(c.deadline, statement_timestamp() + %(ahead)s::interval + c.lifetime), c.retry::jsonb,
         coalesce(c.on_cancel, false),
         parent.id, parent.round, c.index
  from unnest(%(parents)s::bigint[], %(indexes)s::int[],
              %(fsms)s::text[], %(fsm_versions)s::int[], %(child_steps)s::text[], %(child_states)s::text[],
              %(queues)s::text[], %(priorities)s::smallint[], %(partition_keys)s::text[],
              %(unique_keys)s::bytea[], %(unique_scopes)s::text[], %(max_crashes)s::int[],
              %(eligible_ats)s::timestamptz[], %(delays)s::interval[], %(rate_limits)s::text[], %(weights)s::int[],
              %(concurrency_limits)s::text[], %(deadlines)s::timestamptz[], %(lifetimes)s::interval[],
              %(retries)s::text[], %(on_cancels)s::boolean[])
         as c (parent, index, fsm, fsm_version, step, state, queue, priority, partition_key,
               unique_key, unique_scope, max_crashes, eligible_at, delay, rate_limit, weight,
               concurrency_limit, deadline, lifetime, retry, on_cancel)
  join parent on parent.id = c.parent
  order by c.unique_key nulls first, c.parent, c.index
  on conflict (unique_guard) where unique_guard is not null do nothing
  returning parent_id
), barrier as (
  select parent_id, count(*) as pending from child group by parent_id
), parked as (
  update gen_durable g
  set status = (case when barrier.pending is null then 'runnable' else 'awaiting_children' end)::durable_status,
      step = parent.step,
      state = parent.state::jsonb,
      children_pending = coalesce(barrier.pending, 0),
      spawn_round = parent.round,
      join_round = parent.round,
      eligible_at = statement_timestamp() + %(ahead)s::interval,
      attempt = 0,
      crashes = 0,
      last_error = parent.error,
      awaits = null,
      await_deadline = case when barrier.pending is not null
                            then statement_timestamp() + %(ahead)s::interval + parent.timeout end,
      fail_fast = coalesce(parent.fail_fast and barrier.pending is not null, false),
      cancelling = false,
      rate_limit = null,
      weight = 1,
      concurrency_limit = null,
      locked_by = null,
      lease_expires_at = null,
      updated_at = statement_timestamp()
  from parent
  left join barrier on barrier.parent_id = parent.id
  where g.id = parent.id
  returning g.id
), consumed as (
  delete from signals s
  using parked
  where s.target_id = parked.id and s.id = any (%(consumed)s::bigint[])
)
select id from parked
