-- advance: Next. Runnable at another step; the signals that the step was shown are consumed.
-- Consumed by id, never by name: a signal that arrived meanwhile must survive.
with moved as (
  update gen_durable g
  set status = 'runnable',
      step = t.step,
      state = t.state::jsonb,
      eligible_at = statement_timestamp() + %(ahead)s::interval + t.delay,
      attempt = 0,
      crashes = 0,
      last_error = t.error,
      awaits = null,
      await_deadline = null,
      join_round = null,
      rate_limit = t.rate_limit,
      weight = coalesce(t.weight, 1),
      concurrency_limit = t.concurrency_limit,
      fail_fast = false,
      cancelling = false,
      locked_by = null,
      lease_expires_at = null,
      updated_at = statement_timestamp()
  from unnest(%(ids)s::bigint[], %(fences)s::bigint[], %(steps)s::text[], %(states)s::text[],
              %(delays)s::interval[], %(errors)s::text[], %(rate_limits)s::text[], %(weights)s::int[],
              %(concurrency_limits)s::text[])
         as t (id, fence, step, state, delay, error, rate_limit, weight, concurrency_limit)
  where g.id = t.id and g.fence = t.fence and g.status::text = 'executing'
  returning g.id
), consumed as (
  delete from signals s
  using moved
  where s.target_id = moved.id and s.id = any (%(consumed)s::bigint[])
)
select id from moved
