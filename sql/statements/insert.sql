-- insert: one or many instances; an occupied unique key skips its row.
-- Ordered by unique key: two batches with the same new keys would otherwise wait for each other in a ring.
-- Rows without a key keep the caller's order, which is their order within a partition key.
insert into gen_durable
  (fsm, fsm_version, step, state, queue, priority, partition_key, unique_key, unique_scope, max_crashes, eligible_at,
   rate_limit, weight, concurrency_limit, deadline, retry, on_cancel)
select n.fsm, n.fsm_version, n.step, n.state::jsonb, n.queue, n.priority, n.partition_key, n.unique_key,
       string_to_array(n.unique_scope, ',')::durable_status[], n.max_crashes,
       coalesce(n.eligible_at, statement_timestamp() + %(ahead)s::interval + n.delay),
       n.rate_limit, coalesce(n.weight, 1), n.concurrency_limit,
       coalesce(n.deadline, statement_timestamp() + %(ahead)s::interval + n.lifetime), n.retry::jsonb,
       coalesce(n.on_cancel, false)
from unnest(%(fsms)s::text[], %(fsm_versions)s::int[], %(steps)s::text[], %(states)s::text[],
            %(queues)s::text[], %(priorities)s::smallint[], %(partition_keys)s::text[],
            %(unique_keys)s::bytea[], %(unique_scopes)s::text[], %(max_crashes)s::int[],
            %(eligible_ats)s::timestamptz[], %(delays)s::interval[], %(rate_limits)s::text[], %(weights)s::int[],
            %(concurrency_limits)s::text[], %(deadlines)s::timestamptz[], %(lifetimes)s::interval[],
            %(retries)s::text[], %(on_cancels)s::boolean[])
       with ordinality
       as n (fsm, fsm_version, step, state, queue, priority, partition_key,
             unique_key, unique_scope, max_crashes, eligible_at, delay, rate_limit, weight,
             concurrency_limit, deadline, lifetime, retry, on_cancel, place)
order by n.unique_key nulls first, n.place
on conflict (unique_guard) where unique_guard is not null do nothing
returning id
