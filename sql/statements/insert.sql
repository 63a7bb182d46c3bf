-- insert: one or many instances; an occupied unique key skips its row.
-- Ordered by unique key: two batches with the same new keys would otherwise wait for each other in a ring.
-- Rows without a key keep the caller's order, which is their order within a partition key.
insert into gen_durable
  (fsm, fsm_version, step, state, queue, priority, partition_key, unique_key, unique_scope, max_crashes, eligible_at)
select n.fsm, n.fsm_version, n.step, n.state::jsonb, n.queue, n.priority, n.partition_key, n.unique_key,
       string_to_array(n.unique_scope, ',')::durable_status[], n.max_crashes,
       coalesce(n.eligible_at, statement_timestamp() + %(ahead)s::interval + n.delay)
from unnest(%(fsms)s::text[], %(fsm_versions)s::int[], %(steps)s::text[], %(states)s::text[],
            %(queues)s::text[], %(priorities)s::smallint[], %(partition_keys)s::text[],
            %(unique_keys)s::bytea[], %(unique_scopes)s::text[], %(max_crashes)s::int[],
            %(eligible_ats)s::timestamptz[], %(delays)s::interval[])
       with ordinality
       as n (fsm, fsm_version, step, state, queue, priority, partition_key,
             unique_key, unique_scope, max_crashes, eligible_at, delay, place)
order by n.unique_key nulls first, n.place
on conflict (unique_guard) where unique_guard is not null do nothing
returning id
