-- open_buckets: make the buckets that are missing, full.
-- In an order, and in a transaction of its own: who waits here for another's insert waits for one statement.
insert into buckets (kind, key, tokens)
select wanted.kind, wanted.key, coalesce(limiter.burst, 0)
from unnest(%(kinds)s::text[], %(keys)s::text[]) as wanted (kind, key)
left join limiters limiter on limiter.kind = wanted.kind and limiter.name = split_part(wanted.key, ':', 1)
order by wanted.kind, wanted.key
on conflict (kind, key) do nothing
returning key
