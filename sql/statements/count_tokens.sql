-- count_tokens: what claim_limited gave and put off, by the name of the rate limit: the rows that our transaction wrote.
select split_part(g.rate_limit, ':', 1) as name,
       coalesce(sum(g.weight) filter (where g.status::text = 'executing'), 0)::bigint as granted,
       coalesce(sum(g.weight) filter (where g.throttled), 0)::bigint as throttled
from gen_durable g
where g.id = any (%(ids)s::bigint[])
  and g.rate_limit is not null
  and g.xmin = pg_current_xact_id()::xid
group by 1
order by 1
