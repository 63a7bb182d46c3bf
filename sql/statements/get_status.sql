-- get_status: where does one instance stand?
select status::text as status from gen_durable where id = %(id)s
