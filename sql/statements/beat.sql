-- beat: this worker process lives; its row says so until the lease would be over.
insert into workers (id, name, host, pid, queues, machines, expires_at)
values (%(worker)s, %(name)s, %(host)s, %(pid)s, %(queues)s::jsonb, %(machines)s::text[],
        statement_timestamp() + %(lease)s::interval)
on conflict (id) do update
set beat_at = statement_timestamp(),
    expires_at = statement_timestamp() + %(lease)s::interval
returning id
