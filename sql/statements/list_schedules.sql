-- list_schedules: the newest tick of each schedule that has been made or passed over, and the time.
select name, last_tick, statement_timestamp() as now from schedules order by name
