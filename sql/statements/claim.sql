-- claim: lease due instances of one queue to one worker, most urgent first.
-- Equality on queue lets gen_durable_pick hand rows over in order, so limit ends the scan after one batch.
-- A keyed row is taken only if no row of its key is executing and it is the first of its key that this worker
-- could run: rows of a busy key never fill the batch, and a head that somebody holds is not overtaken.
-- `avoid` are keys whose lock was found taken a moment ago: left alone for a while rather than given a later
-- eligible_at, which would let their siblings overtake them.
-- Both probes are scalar: as "not exists" inside an "or" they would become a hashed sub-plan over all rows.
-- No key update, not update: a signal on its way in holds the foreign key's lock, and must not hide the row.
with due as (
  select g.id
  from gen_durable g
  where g.status = 'runnable'
    and g.queue = %(queue)s
    and g.eligible_at <= statement_timestamp() + %(ahead)s::interval
    and g.fsm || '@' || g.fsm_version = any (%(machines)s::text[])
    and (
      g.partition_key is null
      or (
        %(keyed)s
        and g.partition_key <> all (%(avoid)s::text[])
        and (select busy.id
         from gen_durable busy
         where busy.status = 'executing' and busy.partition_key = g.partition_key
         limit 1) is null
        and g.id = (
          select head.id
          from gen_durable head
          where head.status = 'runnable'
            and head.queue = g.queue
            and head.partition_key = g.partition_key
            and head.eligible_at <= statement_timestamp() + %(ahead)s::interval
            and head.fsm || '@' || head.fsm_version = any (%(machines)s::text[])
          order by head.priority, head.eligible_at, head.id
          limit 1)
      )
    )
  order by g.priority, g.eligible_at, g.id
  limit %(limit)s
  for no key update of g skip locked
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
       (select true from signals s where s.target_id = c.id limit 1) is not null as has_signals,
       extract(epoch from statement_timestamp() + %(ahead)s::interval
                          - greatest(c.eligible_at, c.inserted_at))::float8 as waited
from claimed c
order by c.priority, c.eligible_at, c.id
