-- open_schedules: remember schedules that are seen for the first time; they begin now.
insert into schedules (name, last_tick)
select name, statement_timestamp()
from unnest(%(names)s::text[]) as name
order by name
on conflict (name) do nothing
returning name
