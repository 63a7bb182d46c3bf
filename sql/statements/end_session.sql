-- end_session: end a session of ours that fell silent, so that the server does not keep its locks for it.
-- Recognized by the time it began too: numbers of processes come back, soon so after a restart.
select pg_terminate_backend(s.pid) as ended
from pg_stat_get_activity(%(pid)s) s
where s.backend_start = %(started)s
