-- release: hand back claims whose step never started or was interrupted; attempt and place in the queue stay as they were.
-- They keep their turn among those that wait for tokens. Tokens that were taken for a step that never started go back:
-- buckets are locked after the rows, in an order, and whoever holds one waits for nobody.
with held as (
  select g.id, g.rate_limit, g.weight
  from gen_durable g
  join unnest(%(ids)s::bigint[], %(fences)s::bigint[]) as t (id, fence) on t.id = g.id
  where g.fence = t.fence and g.status::text = 'executing'
  order by g.id
  for no key update of g
), bucket as (
  select b.kind, b.key, unused.tokens
  from (select held.rate_limit as key, sum(held.weight) as tokens
        from held
        where held.rate_limit is not null and not %(started)s
        group by held.rate_limit) as unused
  join buckets b on b.kind = 'rate' and b.key = unused.key
  order by b.key
  for no key update of b
), refilled as (
  update buckets b
  set tokens = b.tokens + bucket.tokens -- more than it holds, perhaps; that is seen to when tokens are taken
  from bucket
  where b.kind = bucket.kind and b.key = bucket.key
)
update gen_durable g
set status = 'runnable',
    throttled = g.rate_limit is not null,
    locked_by = null,
    lease_expires_at = null,
    updated_at = statement_timestamp()
from held
where g.id = held.id
returning g.id
