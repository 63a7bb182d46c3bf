-- lock_partitions: take partition keys' locks for this session; answers those that nobody else has.
-- A 64-bit hash: 32 bits made unrelated keys wait for each other. Mixed with our own class and the schema, since
-- all applications and schemas of a database share one space of lock numbers.
select t.key
from unnest(%(keys)s::text[]) as t (key)
where pg_try_advisory_lock(hashtextextended(current_schema() || '/' || t.key, %(class)s))
