-- list_paused: the queues that are paused.
select queue from paused_queues order by queue
