-- has_work: is anything of these queues due or running that these machines could run?
-- What is due in a paused queue is nobody's to run; what runs there already is.
-- Plain, limited and keyed rows one after the other: each kind has an index of its own. Rows that wait for tokens were
-- due already; those of a limit that nobody has defined are nobody's to run either.
-- keyed: whether rows with a partition key could be run at all.
with unpaused as (
  select array(select asked.queue
               from unnest(%(queues)s::text[]) as asked (queue)
               where not exists (select from paused_queues p where p.queue = asked.queue)) as queues
)
select (select true
        from gen_durable g
        where g.status = 'runnable'
          and g.partition_key is null
          and g.rate_limit is null
          and g.concurrency_limit is null
          and g.queue = any ((select queues from unpaused)::text[])
          and g.eligible_at <= statement_timestamp()
          and g.fsm || '@' || g.fsm_version = any (%(machines)s::text[])
        limit 1) is not null
    or (select true
        from gen_durable g
        where g.status = 'runnable'
          and g.partition_key is null
          and (g.rate_limit is not null or g.concurrency_limit is not null)
          and not g.throttled
          and g.queue = any ((select queues from unpaused)::text[])
          and g.eligible_at <= statement_timestamp()
          and g.fsm || '@' || g.fsm_version = any (%(machines)s::text[])
          and (g.rate_limit is null
               or split_part(g.rate_limit, ':', 1) = any (array(select name from limiters where kind = 'rate')))
          and (g.concurrency_limit is null
               or split_part(g.concurrency_limit, ':', 1)
                  = any (array(select name from limiters where kind = 'concurrency')))
        limit 1) is not null
    or (select true
        from gen_durable g
        where g.status = 'runnable'
          and g.throttled
          and (%(keyed)s::bool or g.partition_key is null)
          and g.queue = any ((select queues from unpaused)::text[])
          and g.fsm || '@' || g.fsm_version = any (%(machines)s::text[])
        limit 1) is not null
    or (select true
        from gen_durable g
        where g.status = 'runnable'
          and g.partition_key is not null
          and %(keyed)s::bool
          and g.queue = any ((select queues from unpaused)::text[])
          and g.eligible_at <= statement_timestamp()
          and g.fsm || '@' || g.fsm_version = any (%(machines)s::text[])
        limit 1) is not null
    or (select true
        from gen_durable g
        where g.status = 'executing'
          and (%(keyed)s::bool or g.partition_key is null)
          and g.queue = any (%(queues)s::text[])
          and g.fsm || '@' || g.fsm_version = any (%(machines)s::text[])
        limit 1) is not null
    or (select true
        from gen_durable g
        where g.status in ('awaiting_signal', 'awaiting_children')
          and g.await_deadline <= statement_timestamp()
          and (%(keyed)s::bool or g.partition_key is null)
          and g.queue = any ((select queues from unpaused)::text[])
          and g.fsm || '@' || g.fsm_version = any (%(machines)s::text[])
        limit 1) is not null
    or (select true
        from gen_durable g
        where g.status in ('runnable', 'executing', 'awaiting_signal', 'awaiting_children')
          and g.deadline <= statement_timestamp()
          and g.queue = any (%(queues)s::text[])
          and g.fsm || '@' || g.fsm_version = any (%(machines)s::text[])
        limit 1) is not null as has_work
