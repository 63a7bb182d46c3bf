-- examine: what `doctor` wants to know of a server, a role and our tables.
-- Privileges are asked of the tables that the search path finds.
select current_setting('server_version') as version,
       current_setting('server_version_num')::int / 10000 as major,
       pg_is_in_recovery() as standby,
       current_setting('fsync')::boolean as fsync,
       current_setting('synchronous_commit') <> 'off' as synchronous_commit,
       current_user::text as role,
       array(select privilege || ' on ' || name
             from unnest(array['gen_durable', 'signals', 'workers', 'limiters', 'buckets', 'paused_queues', 'schedules'])
               as name,
                  unnest(array['select', 'insert', 'update', 'delete']) as privilege
             where not has_table_privilege(name, privilege)) as missing_rights,
       clock_timestamp() as clock,
       array(select c.relname::text
             from unnest(array['gen_durable', 'signals']) as name
             join pg_class c on c.oid = name::regclass
             where not current_setting('autovacuum')::boolean
                or 'autovacuum_enabled=false' = any (c.reloptions)
                or 'autovacuum_enabled=off' = any (c.reloptions)) as never_vacuumed,
       current_setting('max_connections')::int - current_setting('superuser_reserved_connections')::int as connections
