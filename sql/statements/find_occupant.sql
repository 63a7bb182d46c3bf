-- find_occupant: which instance holds this unique key?
select id from gen_durable where unique_guard = %(unique_key)s
