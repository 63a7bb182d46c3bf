-- count_instances: how many instances each queue holds in each status.
select queue, status::text as status, count(*) as count
from gen_durable
group by queue, status
order by queue, status
