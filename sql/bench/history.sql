-- history: many instances that ended long ago, and many that are due in a year.
insert into gen_durable (fsm, step, status, result, eligible_at, updated_at)
select 'bench.noop', 'perform', (case when n <= %(ended)s then 'done' else 'runnable' end)::durable_status, '{}',
       now() + case when n <= %(ended)s then interval '-1 day' else interval '1 year' end, now() - interval '1 day'
from generate_series(1, %(ended)s + %(future)s) as n
