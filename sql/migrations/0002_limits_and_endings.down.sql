-- What was cancelled has failed. A type cannot lose a value: 'cancelled' stays in it, unused, until the type goes.
drop table schedules;
drop table paused_queues;
drop table buckets;
drop table limiters;

update gen_durable
set status = 'failed', last_error = coalesce(last_error, cancel_reason, 'cancelled')
where status = 'cancelled';

update gen_durable
set unique_scope = array_remove(unique_scope, 'cancelled')
where 'cancelled' = any (unique_scope);

drop index gen_durable_deadline;
drop index gen_durable_await_deadline;
drop index gen_durable_concurrency_active;
drop index gen_durable_lane_head;
drop index gen_durable_promised;
drop index gen_durable_throttled;
drop index gen_durable_pick_limited;
drop index gen_durable_pick;

alter table gen_durable
  drop column rate_limit,
  drop column weight,
  drop column throttled,
  drop column concurrency_limit,
  drop column deadline,
  drop column retry,
  drop column on_cancel,
  drop column cancelling,
  drop column cancel_reason,
  drop column cancel_round,
  drop column fail_fast;

create index gen_durable_pick on gen_durable (queue, priority, eligible_at, id)
  where status = 'runnable' and partition_key is null;

create index gen_durable_await_deadline on gen_durable (await_deadline)
  where status = 'awaiting_signal' and await_deadline is not null;
