-- bare_insert: one row, as an application without us would write it.
insert into gen_durable (fsm, step, queue, state) values (%(fsm)s, 'perform', 'default', '{}') returning id
