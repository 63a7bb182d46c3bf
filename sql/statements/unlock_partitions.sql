-- unlock_partitions: let go of partition keys' locks; answers those that this session held.
select t.key
from unnest(%(keys)s::text[]) as t (key)
where pg_advisory_unlock(hashtextextended(current_schema() || '/' || t.key, %(class)s))
