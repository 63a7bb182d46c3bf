-- unlock_partition: let go of a partition key's lock; false if this session did not hold it.
select pg_advisory_unlock(hashtextextended(current_schema() || '/' || %(key)s, %(class)s)) as unlocked
