-- publish_limiters: make limits known to all; the last to publish a name defines it. What is as it was is not written.
-- In an order: two workers that start together must not wait for each other in a ring.
insert into limiters (kind, name, allowed, period, burst)
select t.kind, t.name, t.allowed, t.period, t.burst
from unnest(%(kinds)s::text[], %(names)s::text[], %(allowed)s::int[], %(periods)s::interval[], %(bursts)s::int[])
       as t (kind, name, allowed, period, burst)
order by t.kind, t.name
on conflict (kind, name) do update
set allowed = excluded.allowed, period = excluded.period, burst = excluded.burst, updated_at = statement_timestamp()
where (limiters.allowed, limiters.period, limiters.burst) is distinct from
      (excluded.allowed, excluded.period, excluded.burst)
returning name
