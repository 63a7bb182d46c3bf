-- hasten_throttled: renew the promises of buckets that have tokens sooner than promised: those in front were cancelled,
-- or cannot run, or the limit was raised. Nobody would look at the bucket before the first of them is due.
-- A bucket that stays full although promises are open is a sign that those in front cannot run, such as rows of a queue
-- without workers: then all are due at once, and those who can run sort it out among themselves.
-- hop: from bucket to bucket. Holds none of them: an instant is when a claim looks again, and it is the claim that counts.
with recursive hop (key) as (
  (select g.rate_limit from gen_durable g where g.status = 'runnable' and g.throttled order by g.rate_limit limit 1)
  union all
  select (select g.rate_limit
          from gen_durable g
          where g.status = 'runnable' and g.throttled and g.rate_limit > hop.key
          order by g.rate_limit
          limit 1)
  from hop
  where hop.key is not null
), bucket as (
  select hop.key, limiter.burst, pace.per_second,
         coalesce(b.refilled_at + make_interval(secs => (limiter.burst - b.tokens) / pace.per_second + 10)
                  < statement_timestamp() + %(ahead)s::interval, false) as stays_full,
         least(limiter.burst,
               coalesce(b.tokens, limiter.burst)
               + coalesce(pace.per_second * greatest(extract(epoch from statement_timestamp() + %(ahead)s::interval
                                                                        - b.refilled_at)::float8, 0), 0)) as tokens
  from hop
  join limiters limiter on limiter.kind = 'rate' and limiter.name = split_part(hop.key, ':', 1)
  cross join lateral (select limiter.allowed / extract(epoch from (limiter.period))::float8 as per_second) as pace
  left join buckets b on b.kind = 'rate' and b.key = hop.key
), late as materialized (
  select bucket.*
  from bucket
  cross join lateral (
    select w.eligible_at, w.weight
    from gen_durable w
    where w.status = 'runnable'
      and w.throttled
      and w.rate_limit = bucket.key
      and w.eligible_at > statement_timestamp() + %(ahead)s::interval
    order by w.eligible_at, w.id
    limit 1
  ) as next
  where next.eligible_at > statement_timestamp() + %(ahead)s::interval + interval '100 ms'
                           + make_interval(secs => greatest((least(next.weight, bucket.burst) - bucket.tokens)
                                                            / bucket.per_second, 0))
), waiting as (
  select w.id, late.tokens, late.per_second, late.stays_full,
         sum(least(w.weight, late.burst)) over (partition by late.key order by w.eligible_at, w.id) as total
  from late
  cross join lateral (
    select g.id, g.weight, g.eligible_at
    from gen_durable g
    where g.status = 'runnable'
      and g.throttled
      and g.rate_limit = late.key
      and g.eligible_at > statement_timestamp() + %(ahead)s::interval
    order by g.eligible_at, g.id
    limit %(limit)s
    for no key update of g skip locked
  ) as w
), renewed as (
  select waiting.id,
         statement_timestamp() + %(ahead)s::interval + interval '1 microsecond'
         + case when waiting.stays_full then interval '0'
                else make_interval(secs => least(greatest((waiting.total - waiting.tokens) / waiting.per_second, 0),
                                                 30 * 86400.0)) end as eligible_at
  from waiting
)
update gen_durable g
set eligible_at = renewed.eligible_at,
    updated_at = statement_timestamp()
from renewed
where g.id = renewed.id and g.eligible_at > renewed.eligible_at
returning g.queue
