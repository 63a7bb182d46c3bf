-- reap: take expired claims away from workers that died or stalled; the step will run again.
-- Never waits for a row (skip locked): a locked row is being worked on, and two sweeps cannot block each other.
-- An instance whose crash budget is spent is not put back: the reaper claims it and ends it as any outcome does,
-- so that inbox and parent are treated in one place. If the reaper dies before that, the row expires again.
with expired as (
  select g.id, coalesce(g.crashes + 1 >= g.max_crashes, false) as spent
  from gen_durable g
  where g.status = 'executing'
    and g.lease_expires_at < statement_timestamp() + %(ahead)s::interval
  order by g.lease_expires_at
  limit %(limit)s
  for no key update of g skip locked
)
update gen_durable g
set status = (case when expired.spent then 'executing' else 'runnable' end)::durable_status,
    locked_by = case when expired.spent then %(worker)s end,
    lease_expires_at = case when expired.spent
                            then statement_timestamp() + %(ahead)s::interval + %(lease)s::interval end,
    fence = g.fence + 1,
    attempt = g.attempt + 1,
    crashes = g.crashes + 1,
    updated_at = statement_timestamp()
from expired
where g.id = expired.id
returning g.id, g.fence, g.queue, g.fsm, g.step, g.crashes, expired.spent
