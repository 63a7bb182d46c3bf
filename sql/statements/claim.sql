-- claim: lease due instances of one queue to one worker, most urgent first.
-- Equality on queue lets the indexes hand rows over in order, so that limit ends the scans after one batch.
-- A keyed row is taken only if no row of its key is executing and it is the head of its key: the first that this worker
-- could run. So siblings never fill the batch, and a head that somebody holds is not overtaken.
-- paused: looked up once; a queue that somebody has paused has nothing to give.
-- near: the first due rows with a key, in order; the first of each key among them is the head of its key.
-- hop: only if blocked siblings fill that window; goes from key to key instead of from row to row.
-- beyond: the key behind which it starts, to go round from there, back to it. Always from the first key on, those at the
-- end would starve for as long as the others have work.
-- A limited row is not taken here, but it is the head of its key all the same: its siblings wait behind it.
-- avoid: keys whose lock was found taken a moment ago; left alone for a while rather than given a later eligible_at,
-- which would let their siblings overtake them.
-- array_position, not any: without statistics on the expression the planner would expect next to no row to pass, and
-- sort the whole backlog for the few; a test for null it expects to pass.
-- No key update, not update: a signal on its way in holds the foreign key's lock, and must not hide the row.
with recursive paused as (
  select from paused_queues p where p.queue = %(queue)s
), plain as (
  select g.id, g.priority, g.eligible_at
  from gen_durable g
  where g.status = 'runnable'
    and g.partition_key is null
    and g.rate_limit is null
    and g.concurrency_limit is null
    and not exists (select from paused)
    and g.queue = %(queue)s
    and g.eligible_at <= statement_timestamp() + %(ahead)s::interval
    and array_position(%(machines)s::text[], g.fsm || '@' || g.fsm_version) is not null
  order by g.priority, g.eligible_at, g.id
  limit %(limit)s
  for no key update of g skip locked
), near as (
  select g.id, g.priority, g.eligible_at, g.partition_key,
         g.rate_limit is not null or g.concurrency_limit is not null as limited
  from gen_durable g
  where g.status = 'runnable'
    and g.partition_key is not null
    and not exists (select from paused)
    and g.queue = %(queue)s
    and g.eligible_at <= statement_timestamp() + %(ahead)s::interval
    and array_position(%(machines)s::text[], g.fsm || '@' || g.fsm_version) is not null
  order by g.priority, g.eligible_at, g.id
  limit 2 * %(limit)s + 50
), near_head as (
  select head.id, head.priority, head.eligible_at
  from (
    select distinct on (near.partition_key) near.id, near.priority, near.eligible_at, near.partition_key, near.limited
    from near
    order by near.partition_key, near.priority, near.eligible_at, near.id
  ) as head
  where not head.limited
    and head.partition_key <> all (%(avoid)s::text[])
    and (select true
         from gen_durable busy
         where busy.status = 'executing' and busy.partition_key = head.partition_key
         limit 1) is null
), hop (partition_key, lap) as (
  select %(beyond)s::text, 0
  where (select count(*) from near) >= 2 * %(limit)s + 50
    and (select count(*) from near_head) < %(limit)s
  union all
  select (select g.partition_key
          from gen_durable g
          where g.status = 'runnable'
            and g.partition_key is not null
            and g.queue = %(queue)s
            and g.partition_key > coalesce(hop.partition_key, '')
            and g.eligible_at <= statement_timestamp() + %(ahead)s::interval
          order by g.partition_key
          limit 1),
         case when hop.partition_key is null then 2 when hop.lap = 0 then 1 else hop.lap end
  from hop
  where hop.lap < 2 or hop.partition_key < %(beyond)s::text
), far_head as (
  select head.id, head.priority, head.eligible_at
  from hop
  cross join lateral (
    select g.id, g.priority, g.eligible_at, g.rate_limit is not null or g.concurrency_limit is not null as limited
    from gen_durable g
    where g.status = 'runnable'
      and g.partition_key = hop.partition_key
      and g.queue = %(queue)s
      and g.eligible_at <= statement_timestamp() + %(ahead)s::interval
      and array_position(%(machines)s::text[], g.fsm || '@' || g.fsm_version) is not null
    order by g.priority, g.eligible_at, g.id
    limit 1
  ) as head
  where not head.limited
    and (hop.lap = 1 or (hop.lap = 2 and hop.partition_key <= %(beyond)s::text))
    and hop.partition_key <> all (%(avoid)s::text[])
    and (select true
         from gen_durable busy
         where busy.status = 'executing' and busy.partition_key = hop.partition_key
         limit 1) is null
  limit %(limit)s
), keyed as (
  select g.id, g.priority, g.eligible_at
  from (select * from near_head union select * from far_head) as head
  join gen_durable g on g.id = head.id
  where g.status::text = 'runnable'
    -- Asked again of the row as it is once it is locked: it may have run and gone back since the heads were found.
    and g.eligible_at <= statement_timestamp() + %(ahead)s::interval
    and array_position(%(machines)s::text[], g.fsm || '@' || g.fsm_version) is not null
    and g.rate_limit is null
    and g.concurrency_limit is null
  order by head.priority, head.eligible_at, head.id
  limit %(limit)s
  for no key update of g skip locked
), due as (
  select found.id
  from (select * from plain union all select * from keyed) as found
  order by found.priority, found.eligible_at, found.id
  limit %(limit)s
), claimed as (
  update gen_durable g
  set status = 'executing',
      locked_by = %(worker)s,
      lease_expires_at = statement_timestamp() + %(ahead)s::interval + %(lease)s::interval,
      fence = g.fence + 1,
      updated_at = statement_timestamp()
  from due
  where g.id = due.id
  returning g.*
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
