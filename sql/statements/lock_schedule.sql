-- lock_schedule: hold one schedule while its ticks are made. Nothing comes back if another worker holds it.
-- Locked, the row is read as it is now, not as it was when the statement began: with the tick that somebody else made.
select name, last_tick, statement_timestamp() + %(ahead)s::interval as now
from schedules
where name = %(name)s
for no key update skip locked
