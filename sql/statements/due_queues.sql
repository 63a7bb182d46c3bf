-- due_queues: the queues that hold due work.
select distinct queue
from gen_durable
where status = 'runnable' and eligible_at <= statement_timestamp() + %(ahead)s::interval
order by queue
