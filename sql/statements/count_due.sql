-- count_due: per queue, how many instances are due, and for how long the oldest of them has been.
-- A row whose partition key is busy counts as well: it waits for a worker's time like any other.
-- Plain, limited and keyed rows one after the other: each kind has an index of its own.
with due as (
  select queue, count(*) as due, min(eligible_at) as oldest
  from gen_durable
  where status = 'runnable' and partition_key is null and rate_limit is null and concurrency_limit is null
    and eligible_at <= statement_timestamp()
  group by queue
  union all
  select queue, count(*), min(eligible_at)
  from gen_durable
  where status = 'runnable' and partition_key is null and (rate_limit is not null or concurrency_limit is not null)
    and not throttled and eligible_at <= statement_timestamp()
  group by queue
  union all
  select queue, count(*), min(eligible_at)
  from gen_durable
  where status = 'runnable' and partition_key is null and throttled and eligible_at <= statement_timestamp()
  group by queue
  union all
  select queue, count(*), min(eligible_at)
  from gen_durable
  where status = 'runnable' and partition_key is not null and eligible_at <= statement_timestamp()
  group by queue
)
select queue, sum(due)::bigint as due,
       extract(epoch from statement_timestamp() - min(oldest))::float8 as oldest_due_seconds
from due
group by queue
order by queue
