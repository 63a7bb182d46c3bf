-- pause_queue: no claim that begins after this is committed takes anything from the queue. True: it was not paused before.
insert into paused_queues (queue)
values (%(queue)s)
on conflict (queue) do nothing
returning true as paused
