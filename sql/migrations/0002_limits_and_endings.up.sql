-- 0002: cancellation and deadlines, rate and concurrency limits, retry policies of single instances, paused queues,
-- schedules.

-- Not to be named further down: a new value can be used only once the transaction that brings it has committed.
alter type durable_status add value if not exists 'cancelled';

-- Defaults are constants and the rest may be null: no row is rewritten.
alter table gen_durable
  -- limits on the next execution of the current step: "name", or "name:tenant"
  add column rate_limit        text,
  add column weight            int not null default 1,
  add column throttled         boolean not null default false,
  add column concurrency_limit text,
  -- how the instance may end
  add column deadline          timestamptz,
  add column retry             jsonb,
  add column on_cancel         boolean not null default false,
  add column cancelling        boolean not null default false,
  add column cancel_reason     text,
  add column cancel_round      int,
  add column fail_fast         boolean not null default false;

comment on column gen_durable.rate_limit is 'the bucket that a claim takes weight tokens from: name, or name:tenant';
comment on column gen_durable.throttled is 'tokens were short: eligible_at is when they will be there';
comment on column gen_durable.concurrency_limit is 'counts towards this limit while executing: name, or name:tenant';
comment on column gen_durable.deadline is 'an instance that still lives then ends failed';
comment on column gen_durable.retry is 'the retry policy of this very instance; null: that of its machine';
comment on column gen_durable.on_cancel is 'its machine has a hook: a cancelled instance compensates before it ends';
comment on column gen_durable.cancelling is 'the hook runs next, in place of the step';
comment on column gen_durable.cancel_reason is 'why it was cancelled; set as soon as it was asked for';
comment on column gen_durable.cancel_round is 'its spawn_round when it was cancelled; later ones are its compensation''s';
comment on column gen_durable.fail_fast is 'the first child that fails opens the barrier it waits at';

-- Limited rows stand apart: rows without a limit must not pay for them, nor wait behind them.
drop index gen_durable_pick;
create index gen_durable_pick on gen_durable (queue, priority, eligible_at, id)
  where status = 'runnable' and partition_key is null and rate_limit is null and concurrency_limit is null;

create index gen_durable_pick_limited on gen_durable (queue, priority, eligible_at, id)
  where status = 'runnable' and (rate_limit is not null or concurrency_limit is not null) and not throttled;

-- Those whose tokens were short: by the instant that they were promised, in their queue and in their bucket.
create index gen_durable_throttled on gen_durable (queue, eligible_at, id)
  where status = 'runnable' and throttled;

create index gen_durable_promised on gen_durable (rate_limit, eligible_at, id)
  where status = 'runnable' and throttled;

-- Limited rows by what may block them, a lane each: their partition key, or else their concurrency limit. From lane to
-- lane within a queue, and the first rows of each; and how many of one concurrency limit are running.
create index gen_durable_lane_head on gen_durable
  (queue, coalesce('p' || partition_key, 'c' || concurrency_limit, ''), priority, eligible_at, id)
  where status = 'runnable' and (rate_limit is not null or concurrency_limit is not null);

create index gen_durable_concurrency_active on gen_durable (concurrency_limit)
  where status = 'executing' and concurrency_limit is not null;

-- Barriers have deadlines too.
drop index gen_durable_await_deadline;
create index gen_durable_await_deadline on gen_durable (await_deadline)
  where status in ('awaiting_signal', 'awaiting_children') and await_deadline is not null;

create index gen_durable_deadline on gen_durable (deadline)
  where status in ('runnable', 'executing', 'awaiting_signal', 'awaiting_children') and deadline is not null;

-- Limits as workers have them in their configuration, so that whoever writes a limited row can be told of a misspelling.
create table limiters (
  kind       text not null check (kind in ('rate', 'concurrency')),
  name       text not null,
  allowed    int not null check (allowed >= 1),
  period     interval,
  burst      int,
  updated_at timestamptz not null default now(),
  primary key (kind, name),
  check (kind <> 'rate' or (period > '0' and burst >= 1))
);

comment on column limiters.allowed is 'rate: tokens per period; concurrency: executions at once';

-- What is left of each limit, a row per tenant. Held by a claim while it counts; one that is missing is full.
create table buckets (
  kind        text not null,
  key         text not null,
  tokens      float8 not null default 0,
  refilled_at timestamptz not null default now(),
  held_by     xid8,
  primary key (kind, key)
);

comment on column buckets.tokens is 'rate: what was left at refilled_at';
comment on column buckets.refilled_at is 'concurrency: when it was last looked at';
comment on column buckets.held_by is 'the transaction that holds it, or held it last';

create table paused_queues (
  queue     text primary key,
  paused_at timestamptz not null default now()
);

create table schedules (
  name       text primary key,
  last_tick  timestamptz not null,
  updated_at timestamptz not null default now()
);

comment on column schedules.last_tick is 'the newest tick that has its instance; the next one is later';
