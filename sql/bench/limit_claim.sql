-- limit_claim: the barest claim that the schema allows: no fence, no machines, no keyed and no limited rows.
with due as (
  select id
  from gen_durable
  where status = 'runnable' and partition_key is null and rate_limit is null and concurrency_limit is null
    and queue = %(queue)s and eligible_at <= now()
  order by priority, eligible_at, id
  limit %(limit)s
  for no key update skip locked
)
update gen_durable g
set status = 'executing', locked_by = 'limit', lease_expires_at = now() + interval '1 minute', updated_at = now()
from due
where g.id = due.id
returning g.id, g.fsm, g.fsm_version, g.step, g.state, g.attempt
