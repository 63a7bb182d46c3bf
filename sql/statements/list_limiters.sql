-- list_limiters: the limits that have been published.
select kind, name, allowed, period, burst from limiters order by kind, name
