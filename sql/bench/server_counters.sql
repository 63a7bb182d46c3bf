-- server_counters: transactions of this database and the position in the write-ahead log.
select xact_commit as transactions, (pg_current_wal_insert_lsn() - '0/0'::pg_lsn)::bigint as wal_bytes
from pg_stat_database
where datname = current_database()
