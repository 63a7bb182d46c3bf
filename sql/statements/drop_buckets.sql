-- drop_buckets: delete buckets that have long been full, or whose limit is gone; a missing one is a full one.
with idle as (
  select b.kind, b.key
  from buckets b
  left join limiters limiter on limiter.kind = b.kind and limiter.name = split_part(b.key, ':', 1)
  where b.refilled_at < statement_timestamp() - interval '1 hour'
                        - coalesce(limiter.period * (limiter.burst::float8 / limiter.allowed), interval '0')
  limit %(limit)s
  for no key update of b skip locked
)
delete from buckets b
using idle
where b.kind = idle.kind and b.key = idle.key
returning b.key
