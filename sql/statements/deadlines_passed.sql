-- deadlines_passed: is any await overdue, or any instance? The one look of a sweep that finds nothing to do.
select (select true
        from gen_durable g
        where g.status in ('awaiting_signal', 'awaiting_children')
          and g.await_deadline <= statement_timestamp() + %(ahead)s::interval
        order by g.await_deadline
        limit 1) is not null as awaits,
       (select true
        from gen_durable g
        where g.status in ('runnable', 'executing', 'awaiting_signal', 'awaiting_children')
          and g.deadline <= statement_timestamp() + %(ahead)s::interval
        order by g.deadline
        limit 1) is not null as instances
