-- get_status: where does one instance stand? Asked again and again by whoever waits for its end.
select status::text as status from gen_durable where id = %(id)s
