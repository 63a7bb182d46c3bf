-- get_statuses: where do these instances stand? Asked again and again by whoever waits for them.
select id, status::text as status from gen_durable where id = any (%(ids)s::bigint[])
