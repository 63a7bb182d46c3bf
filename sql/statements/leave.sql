-- leave: this worker process ends; rows of those that died without a word go with it, a day after their last beat.
delete from workers
where id = %(worker)s or expires_at < statement_timestamp() - interval '1 day'
returning id
