-- advance_schedule: write down the newest tick that has passed, in the transaction that inserts its instance.
update schedules
set last_tick = %(tick)s, updated_at = statement_timestamp()
where name = %(name)s
returning name
