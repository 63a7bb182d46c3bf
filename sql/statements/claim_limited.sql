-- claim_limited: lease limited instances to one worker, as far as places and tokens go; the others are told when.
-- Runs after hold_buckets in the same transaction: whoever takes a place or a token of these buckets waits for us, and
-- this statement's snapshot shows what was taken before. Rows whose bucket is another's are left alone.
-- First the places of the concurrency limits, then tokens, so that none is spent on a row that is not claimed.
-- A row that does not fit into its bucket is throttled: eligible_at is when its tokens will be there, those in front of
-- it served. None overtakes it: the total of all in front must fit, and while promises are open (promised), rows
-- without one queue behind the last. A row that had its promise and lost out all the same is counted from now.
-- Nobody is throttled whose bucket has tokens that only found no room: the next look comes at once, and a promise made
-- to those behind would push them back.
-- More tokens than a bucket holds will never be there: who wants them waits for a full one. A promise ends after a month:
-- it is renewed then. The millionth of a token, and the microsecond, are for rounding.
with held as materialized (
  select b.kind, b.key, b.tokens, b.refilled_at
  from unnest(%(kinds)s::text[], %(keys)s::text[]) as wanted (kind, key)
  join buckets b on b.kind = wanted.kind and b.key = wanted.key
  where b.held_by = pg_current_xact_id()
), due as (
  select g.id, g.priority, g.eligible_at, g.rate_limit, g.weight, g.throttled, g.concurrency_limit
  from gen_durable g
  where g.id = any (%(ids)s::bigint[])
    and g.status::text = 'runnable'
    and g.eligible_at <= statement_timestamp() + %(ahead)s::interval
    and (g.rate_limit is not null or g.concurrency_limit is not null)
    and (g.rate_limit is null or g.rate_limit = any (array(select held.key from held where held.kind = 'rate')))
    and (g.concurrency_limit is null
         or g.concurrency_limit = any (array(select held.key from held where held.kind = 'concurrency')))
    and (g.partition_key is null
         or (select true
             from gen_durable busy
             where busy.status = 'executing' and busy.partition_key = g.partition_key
             limit 1) is null)
  order by g.id
  for no key update of g skip locked
), gate as materialized (
  select held.key,
         limiter.allowed - (select count(*)
                            from gen_durable busy
                            where busy.status = 'executing' and busy.concurrency_limit = held.key) as free
  from held
  join limiters limiter on limiter.kind = 'concurrency' and limiter.name = split_part(held.key, ':', 1)
  where held.kind = 'concurrency'
), bucket as materialized (
  select held.key, limiter.burst, pace.per_second,
         least(limiter.burst,
               held.tokens + pace.per_second * greatest(extract(epoch from statement_timestamp() + %(ahead)s::interval
                                                                           - held.refilled_at)::float8, 0)) as tokens,
         (select extract(epoch from max(waiting.eligible_at) - statement_timestamp() - %(ahead)s::interval)::float8
          from gen_durable waiting
          where waiting.status = 'runnable'
            and waiting.throttled
            and waiting.rate_limit = held.key
            and waiting.eligible_at > statement_timestamp() + %(ahead)s::interval) as promised
  from held
  join limiters limiter on limiter.kind = 'rate' and limiter.name = split_part(held.key, ':', 1)
  cross join lateral (select limiter.allowed / extract(epoch from (limiter.period))::float8 as per_second) as pace
  where held.kind = 'rate'
), placed as (
  select due.*, row_number() over (partition by due.concurrency_limit
                                   order by due.priority, due.eligible_at, due.id) as place
  from due
), asking as (
  select placed.*, bucket.tokens, bucket.per_second, bucket.promised,
         least(placed.weight, bucket.burst) as cost,
         placed.throttled or bucket.promised is null as served_now
  from placed
  left join gate on gate.key = placed.concurrency_limit
  left join bucket on bucket.key = placed.rate_limit
  where (placed.concurrency_limit is null or placed.place <= gate.free)
    and (placed.rate_limit is null or bucket.key is not null)
), counted as (
  select asking.*, sum(asking.cost) over (partition by asking.rate_limit, asking.served_now
                                          order by asking.priority, asking.throttled desc, asking.eligible_at, asking.id
                                         ) as total
  from asking
), judged as (
  select counted.*,
         counted.rate_limit is null
           or (counted.served_now and counted.total <= counted.tokens + 1e-6) as fits
  from counted
), chosen as (
  select judged.id, judged.rate_limit, judged.cost
  from judged
  where judged.fits
  order by judged.priority, judged.eligible_at, judged.id
  limit %(limit)s
), roomless as (
  select distinct judged.rate_limit as key
  from judged
  where judged.fits and judged.rate_limit is not null and judged.id not in (select chosen.id from chosen)
), claimed as (
  update gen_durable g
  set status = 'executing',
      throttled = false,
      locked_by = %(worker)s,
      lease_expires_at = statement_timestamp() + %(ahead)s::interval + %(lease)s::interval,
      fence = g.fence + 1,
      updated_at = statement_timestamp()
  from chosen
  where g.id = chosen.id
  returning g.*
), spent as (
  update buckets b
  set tokens = greatest(bucket.tokens - taken.cost, 0),
      refilled_at = statement_timestamp() + %(ahead)s::interval
  from (select chosen.rate_limit, sum(chosen.cost) as cost from chosen group by chosen.rate_limit) as taken
  join bucket on bucket.key = taken.rate_limit
  where b.kind = 'rate' and b.key = taken.rate_limit
), put_off as (
  update gen_durable g
  set throttled = true,
      eligible_at = statement_timestamp() + %(ahead)s::interval + interval '1 microsecond'
                    + make_interval(secs => least(case when late.served_now
                                                       then (late.total - late.tokens) / late.per_second
                                                       else late.promised + late.total / late.per_second
                                                  end, 30 * 86400.0)),
      updated_at = statement_timestamp()
  from judged late
  where g.id = late.id
    and not late.fits
    and late.rate_limit not in (select roomless.key from roomless)
)
select c.id, c.fence, c.fsm, c.fsm_version, c.step, c.state::text as state, c.attempt, c.queue, c.priority,
       c.partition_key, c.awaits, c.parent_id, c.last_error, c.spawn_round, c.join_round,
       c.retry::text as retry, c.cancelling, c.cancel_reason, c.fail_fast, c.deadline::text as deadline,
       c.rate_limit is not null or c.concurrency_limit is not null as limited,
       (select true from signals s where s.target_id = c.id limit 1) is not null as has_signals,
       extract(epoch from statement_timestamp() + %(ahead)s::interval
                          - greatest(c.eligible_at, c.inserted_at))::float8 as waited
from claimed c
order by c.priority, c.eligible_at, c.id
