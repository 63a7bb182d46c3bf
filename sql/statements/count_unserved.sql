-- count_unserved: due rows that no live worker has the code for; they stay untouched until one has.
-- Plain, limited and keyed rows one after the other: each kind has an index of its own.
with due as (
  select fsm, fsm_version, count(*) as count
  from gen_durable
  where status = 'runnable' and partition_key is null and rate_limit is null and concurrency_limit is null
    and eligible_at <= statement_timestamp()
  group by fsm, fsm_version
  union all
  select fsm, fsm_version, count(*)
  from gen_durable
  where status = 'runnable' and partition_key is null and (rate_limit is not null or concurrency_limit is not null)
    and not throttled and eligible_at <= statement_timestamp()
  group by fsm, fsm_version
  union all
  select fsm, fsm_version, count(*)
  from gen_durable
  where status = 'runnable' and partition_key is null and throttled and eligible_at <= statement_timestamp()
  group by fsm, fsm_version
  union all
  select fsm, fsm_version, count(*)
  from gen_durable
  where status = 'runnable' and partition_key is not null and eligible_at <= statement_timestamp()
  group by fsm, fsm_version
)
select due.fsm, due.fsm_version, sum(due.count)::bigint as count
from due
where not exists (
  select from workers w
  where w.expires_at > statement_timestamp() and due.fsm || '@' || due.fsm_version = any (w.machines))
group by due.fsm, due.fsm_version
order by due.fsm, due.fsm_version
