-- blocked: a busy partition key with a deep backlog at the head of the queue.
insert into gen_durable (fsm, step, status, priority, partition_key, locked_by, lease_expires_at)
select 'bench.noop', 'perform', (case when n = 0 then 'executing' else 'runnable' end)::durable_status, -1, 'hot',
       case when n = 0 then 'somebody' end, case when n = 0 then now() + interval '1 day' end
from generate_series(0, %(count)s) as n
