-- urgent_future: a backlog that is more urgent than everything else, but not due.
insert into gen_durable (fsm, step, priority, eligible_at)
select 'bench.noop', 'perform', -1, now() + interval '1 day' + n * interval '1 second'
from generate_series(1, %(count)s) as n
