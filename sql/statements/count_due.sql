-- count_due: how many rows of each queue are due, and for how long the oldest has been.
-- A row whose partition key is busy counts as well: it waits for a worker's time like any other.
select queue, count(*) as due,
       extract(epoch from statement_timestamp() - min(eligible_at))::float8 as oldest_due_seconds
from gen_durable
where status = 'runnable' and eligible_at <= statement_timestamp()
group by queue
order by queue
