-- is_paused: is this queue paused? Asked by a worker that holds claims of it which it has not begun.
select true as paused from paused_queues where queue = %(queue)s
