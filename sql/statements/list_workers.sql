-- list_workers: the worker processes that have been heard of lately enough to be alive.
select id, name, host, pid, queues, machines, started_at, beat_at, expires_at
from workers
where expires_at > statement_timestamp()
order by name, started_at, id
