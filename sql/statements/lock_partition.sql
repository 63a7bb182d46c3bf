-- lock_partition: take a partition key's lock for this session, or learn that somebody has it.
-- A 64-bit hash: 32 bits made unrelated keys wait for each other. Mixed with our own class and the schema, since
-- all applications and schemas of a database share one space of lock numbers.
select pg_try_advisory_lock(hashtextextended(current_schema() || '/' || %(key)s, %(class)s)) as locked
