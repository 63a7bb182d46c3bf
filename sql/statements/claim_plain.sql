-- claim_plain: claim, but of rows without a partition key only, at less than half the cost.
-- Of use to a worker that saw a moment ago that its queue has no others.
with due as (
  select g.id
  from gen_durable g
  where g.status = 'runnable'
    and g.partition_key is null
    and g.rate_limit is null
    and g.concurrency_limit is null
    and not exists (select from paused_queues p where p.queue = %(queue)s)
    and g.queue = %(queue)s
    and g.eligible_at <= statement_timestamp() + %(ahead)s::interval
    and array_position(%(machines)s::text[], g.fsm || '@' || g.fsm_version) is not null
  order by g.priority, g.eligible_at, g.id
  limit %(limit)s
  for no key update of g skip locked
), claimed as (
  update gen_durable g
  set status = 'executing',
      locked_by = %(worker)s,
      lease_expires_at = statement_timestamp() + %(ahead)s::interval + %(lease)s::interval,
      fence = g.fence + 1,
      updated_at = statement_timestamp()
  from due
  where g.id = due.id
  returning g.*
)
select c.id, c.fence, c.fsm, c.fsm_version, c.step, c.state::text as state, c.attempt, c.queue, c.priority,
       c.partition_key, c.awaits, c.parent_id, c.last_error, c.spawn_round, c.join_round,
       c.retry::text as retry, c.cancelling, c.cancel_reason, c.fail_fast, c.deadline::text as deadline,
       c.rate_limit is not null or c.concurrency_limit is not null as limited,
       (select true from signals s where s.target_id = c.id limit 1) is not null as has_signals,
       extract(epoch from statement_timestamp() + %(ahead)s::interval
                          - greatest(c.eligible_at, c.inserted_at))::float8 as waited
from claimed c
order by c.priority, c.eligible_at, c.id
