-- resume_queue: let a paused queue be claimed from again. Nothing comes back if it was not paused.
delete from paused_queues where queue = %(queue)s returning true as resumed
