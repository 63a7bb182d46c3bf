drop table workers;
drop table signals;
drop table gen_durable;
drop type durable_status;
