-- find_limited: due instances of a queue with a rate or concurrency limit, as far as they have a chance; most urgent first.
-- Only reads: claim_limited judges them, once their buckets are held. What is blocked must not fill the window, so that
-- it is left out here: rows whose concurrency limit is used up, and rows with a partition key that are not its head.
-- near: the first due rows, in order; of those whose tokens were short, the ones whose instant has come.
-- hop: only if blocked rows fill that window; goes from lane to lane instead of from row to row, a lane being all that
-- one partition key or one concurrency limit may block.
-- plain: the rows without limit that are as urgent; turn is the place among them all, so that neither kind starves the
-- other.
-- Rows of a limit that nobody has defined are passed over.
-- There is always a row: due says how many were seen, next_token when the next of those that wait for tokens is due.
with recursive paused as (
  select from paused_queues p where p.queue = %(queue)s
), known as materialized (
  select coalesce(array_agg(name) filter (where kind = 'rate'), '{}') as rates,
         coalesce(array_agg(name) filter (where kind = 'concurrency'), '{}') as gates
  from limiters
), near as (
  (select g.id, g.priority, g.eligible_at, g.partition_key, g.rate_limit, g.concurrency_limit
   from gen_durable g
   where g.status = 'runnable'
     and (g.rate_limit is not null or g.concurrency_limit is not null)
     and not g.throttled
     and g.queue = %(queue)s
     and not exists (select from paused)
     and g.eligible_at <= statement_timestamp() + %(ahead)s::interval
     and array_position(%(machines)s::text[], g.fsm || '@' || g.fsm_version) is not null
     and (g.partition_key is null or %(keyed)s)
     and (g.rate_limit is null
          or array_position((select rates from known), split_part(g.rate_limit, ':', 1)) is not null)
     and (g.concurrency_limit is null
          or array_position((select gates from known), split_part(g.concurrency_limit, ':', 1)) is not null)
   order by g.priority, g.eligible_at, g.id
   limit %(window)s)
  union all
  (select g.id, g.priority, g.eligible_at, g.partition_key, g.rate_limit, g.concurrency_limit
   from gen_durable g
   where g.status = 'runnable'
     and g.throttled
     and g.queue = %(queue)s
     and not exists (select from paused)
     and g.eligible_at <= statement_timestamp() + %(ahead)s::interval
     and array_position(%(machines)s::text[], g.fsm || '@' || g.fsm_version) is not null
     and (g.partition_key is null or %(keyed)s)
     and array_position((select rates from known), split_part(g.rate_limit, ':', 1)) is not null
     and (g.concurrency_limit is null
          or array_position((select gates from known), split_part(g.concurrency_limit, ':', 1)) is not null)
   order by g.eligible_at, g.id
   limit %(window)s)
), gate as materialized (
  select wanted.key,
         limiter.allowed - (select count(*)
                            from gen_durable busy
                            where busy.status = 'executing' and busy.concurrency_limit = wanted.key) as free
  from (select distinct near.concurrency_limit as key from near where near.concurrency_limit is not null) as wanted
  join limiters limiter on limiter.kind = 'concurrency' and limiter.name = split_part(wanted.key, ':', 1)
), near_open as (
  select placed.id, placed.priority, placed.eligible_at, placed.rate_limit, placed.concurrency_limit
  from (
    select near.*, row_number() over (partition by coalesce('p' || near.partition_key, 'c' || near.concurrency_limit, '')
                                      order by near.priority, near.eligible_at, near.id) as place
    from near
  ) as placed
  left join gate on gate.key = placed.concurrency_limit
  where (placed.concurrency_limit is null or placed.place <= gate.free)
    and (placed.partition_key is null
         or (placed.place = 1
             and placed.partition_key <> all (%(avoid)s::text[])
             and (select head.id
                  from gen_durable head
                  where head.status = 'runnable'
                    and head.partition_key = placed.partition_key
                    and head.queue = %(queue)s
                    and head.eligible_at <= statement_timestamp() + %(ahead)s::interval
                    and array_position(%(machines)s::text[], head.fsm || '@' || head.fsm_version) is not null
                  order by head.priority, head.eligible_at, head.id
                  limit 1) = placed.id
             and (select true
                  from gen_durable busy
                  where busy.status = 'executing' and busy.partition_key = placed.partition_key
                  limit 1) is null))
), hop (lane) as (
  (select coalesce('p' || g.partition_key, 'c' || g.concurrency_limit, '')
   from gen_durable g
   where g.status = 'runnable'
     and (g.rate_limit is not null or g.concurrency_limit is not null)
     and g.queue = %(queue)s
     and (select count(*) from near) >= %(window)s
     and (select count(*) from near_open) < %(limit)s
   order by coalesce('p' || g.partition_key, 'c' || g.concurrency_limit, '')
   limit 1)
  union all
  select (select coalesce('p' || g.partition_key, 'c' || g.concurrency_limit, '')
          from gen_durable g
          where g.status = 'runnable'
            and (g.rate_limit is not null or g.concurrency_limit is not null)
            and g.queue = %(queue)s
            and coalesce('p' || g.partition_key, 'c' || g.concurrency_limit, '') > hop.lane
          order by coalesce('p' || g.partition_key, 'c' || g.concurrency_limit, '')
          limit 1)
  from hop
  where hop.lane is not null
), lane as materialized (
  select hop.lane,
         case left(hop.lane, 1)
           when 'p' then 1
           when 'c' then (select greatest(limiter.allowed - (select count(*)
                                                             from gen_durable busy
                                                             where busy.status = 'executing'
                                                               and busy.concurrency_limit = substr(hop.lane, 2)), 0)
                          from limiters limiter
                          where limiter.kind = 'concurrency' and limiter.name = split_part(substr(hop.lane, 2), ':', 1))
           else %(window)s
         end as free
  from hop
  where hop.lane is not null
), far_open as (
  select first.id, first.priority, first.eligible_at, first.rate_limit, first.concurrency_limit
  from lane
  cross join lateral (
    select g.id, g.priority, g.eligible_at, g.partition_key, g.rate_limit, g.concurrency_limit
    from gen_durable g
    where g.status = 'runnable'
      and (g.rate_limit is not null or g.concurrency_limit is not null)
      and g.queue = %(queue)s
      and coalesce('p' || g.partition_key, 'c' || g.concurrency_limit, '') = lane.lane
      and g.eligible_at <= statement_timestamp() + %(ahead)s::interval
      and array_position(%(machines)s::text[], g.fsm || '@' || g.fsm_version) is not null
      and (g.partition_key is null or %(keyed)s)
      and (g.rate_limit is null
           or array_position((select rates from known), split_part(g.rate_limit, ':', 1)) is not null)
      and (g.concurrency_limit is null
           or array_position((select gates from known), split_part(g.concurrency_limit, ':', 1)) is not null)
    order by g.priority, g.eligible_at, g.id
    limit lane.free
  ) as first
  where lane.free > 0
    and (first.partition_key is null
         or (first.partition_key <> all (%(avoid)s::text[])
             and (select head.id
                  from gen_durable head
                  where head.status = 'runnable'
                    and head.partition_key = first.partition_key
                    and head.queue = %(queue)s
                    and head.eligible_at <= statement_timestamp() + %(ahead)s::interval
                    and array_position(%(machines)s::text[], head.fsm || '@' || head.fsm_version) is not null
                  order by head.priority, head.eligible_at, head.id
                  limit 1) = first.id
             and (select true
                  from gen_durable busy
                  where busy.status = 'executing' and busy.partition_key = first.partition_key
                  limit 1) is null
             and (first.concurrency_limit is null
                  or (select limiter.allowed > (select count(*)
                                                from gen_durable busy
                                                where busy.status = 'executing'
                                                  and busy.concurrency_limit = first.concurrency_limit)
                      from limiters limiter
                      where limiter.kind = 'concurrency'
                        and limiter.name = split_part(first.concurrency_limit, ':', 1)))))
), plain as (
  select g.id, g.priority, g.eligible_at
  from gen_durable g
  where g.status = 'runnable'
    and g.partition_key is null
    and g.rate_limit is null
    and g.concurrency_limit is null
    and g.queue = %(queue)s
    and g.eligible_at <= statement_timestamp() + %(ahead)s::interval
    and array_position(%(machines)s::text[], g.fsm || '@' || g.fsm_version) is not null
    and (select count(*) from near) > 0
  order by g.priority, g.eligible_at, g.id
  limit %(limit)s
), found as (
  select queued.*
  from (
    select each.*, row_number() over (order by each.priority, each.eligible_at, each.id) as turn
    from (select open.*, true as limited
          from (select * from near_open union select * from far_open) as open
          union all
          select plain.*, null, null, false from plain) as each
  ) as queued
  where queued.limited
  order by queued.turn
  limit %(window)s
)
select (select count(*) from near) as due,
       (select extract(epoch from min(g.eligible_at) - statement_timestamp() - %(ahead)s::interval)::float8
        from gen_durable g
        where g.status = 'runnable'
          and g.throttled
          and g.queue = %(queue)s
          and not exists (select from paused)
          and g.eligible_at > statement_timestamp() + %(ahead)s::interval) as next_token,
       found.id, found.rate_limit, found.concurrency_limit, found.turn <= %(limit)s as in_turn,
       (found.rate_limit is null or rate.key is not null)
         and (found.concurrency_limit is null or place.key is not null) as has_buckets
from (values (1)) as always
left join found on true
left join buckets rate on rate.kind = 'rate' and rate.key = found.rate_limit
left join buckets place on place.kind = 'concurrency' and place.key = found.concurrency_limit
order by found.turn
