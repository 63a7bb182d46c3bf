-- server_counters: transactions that this server has begun and the position in its write-ahead log, both exact and current.
-- Only transactions that write are numbered; what merely reads costs little.
select pg_snapshot_xmax(pg_current_snapshot())::text::bigint as writes,
       (pg_current_wal_insert_lsn() - '0/0'::pg_lsn)::bigint as wal_bytes,
       (select xact_commit from pg_stat_database where datname = current_database()) as transactions
