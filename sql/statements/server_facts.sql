-- server_facts: what a worker wants to know of its server before it starts.
select current_setting('server_version') as version,
       current_setting('fsync')::boolean as fsync,
       current_setting('synchronous_commit') <> 'off' as synchronous_commit,
       pg_is_in_recovery() as standby
