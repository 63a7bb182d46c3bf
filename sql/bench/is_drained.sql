-- is_drained: has everything that was due run to its end?
select not exists (select from gen_durable
                   where status = 'runnable' and partition_key is null and eligible_at <= now())
   and not exists (select from gen_durable
                   where status = 'runnable' and partition_key is not null and eligible_at <= now())
   and not exists (select from gen_durable where status = 'executing') as drained
