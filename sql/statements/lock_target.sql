-- lock_target: hold the row that a signal is for, whatever its status.
-- By id alone: a filter on status would not wait for a park under way, and the wake-up would be lost.
select id from gen_durable where id = %(id)s for no key update
