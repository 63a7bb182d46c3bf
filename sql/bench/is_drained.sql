-- is_drained: has everything that was due run to its end?
select not exists (select from gen_durable where status = 'runnable' and eligible_at <= now())
   and not exists (select from gen_durable where status = 'executing')
   and not exists (select from gen_durable where status = 'awaiting_children') as drained
