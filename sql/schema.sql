-- The newest schema, generated from sql/migrations by `make schema`. To be read; nothing runs it.

create type durable_status as enum ('runnable', 'executing', 'awaiting_signal', 'awaiting_children', 'done', 'failed', 'cancelled');

create table buckets (
  kind text not null,
  key text not null,
  tokens double precision not null default 0,
  refilled_at timestamp with time zone not null default now(),
  held_by xid8,
  constraint buckets_pkey PRIMARY KEY (kind, key)
);
comment on column buckets.tokens is 'rate: what was left at refilled_at';
comment on column buckets.refilled_at is 'concurrency: when it was last looked at';
comment on column buckets.held_by is 'the transaction that holds it, or held it last';

create table gen_durable (
  id bigint not null generated always as identity,
  fsm text not null,
  fsm_version integer not null default 1,
  step text not null,
  status durable_status not null default 'runnable'::durable_status,
  state jsonb not null default '{}'::jsonb,
  result jsonb,
  queue text not null default 'default'::text,
  priority smallint not null default 0,
  partition_key text,
  eligible_at timestamp with time zone not null default now(),
  attempt integer not null default 0,
  crashes integer not null default 0,
  max_crashes integer default 20,
  last_error text,
  locked_by text,
  lease_expires_at timestamp with time zone,
  fence bigint not null default 0,
  awaits text[],
  await_deadline timestamp with time zone,
  children_pending integer not null default 0,
  spawn_round integer not null default 0,
  join_round integer,
  parent_id bigint,
  child_round integer,
  child_index integer,
  unique_key bytea,
  unique_scope durable_status[] not null default '{}'::durable_status[],
  unique_guard bytea generated always as (CASE WHEN unique_key IS NOT NULL AND (status = ANY (unique_scope)) THEN unique_key ELSE NULL::bytea END) stored,
  inserted_at timestamp with time zone not null default now(),
  updated_at timestamp with time zone not null default now(),
  rate_limit text,
  weight integer not null default 1,
  throttled boolean not null default false,
  concurrency_limit text,
  deadline timestamp with time zone,
  retry jsonb,
  on_cancel boolean not null default false,
  cancelling boolean not null default false,
  cancel_reason text,
  cancel_round integer,
  fail_fast boolean not null default false,
  constraint gen_durable_pkey PRIMARY KEY (id),
  constraint gen_durable_scope_without_holes CHECK (unique_scope = '{}'::durable_status[] OR unique_scope @> '{runnable,executing,awaiting_signal,awaiting_children}'::durable_status[]),
  constraint gen_durable_parent_id_fkey FOREIGN KEY (parent_id) REFERENCES gen_durable(id) ON DELETE SET NULL
);

comment on table gen_durable is '2';
comment on column gen_durable.step is 'the step that runs next; while parked, the step that runs once woken';
comment on column gen_durable.attempt is 'failed or repeated executions of the current step';
comment on column gen_durable.crashes is 'worker deaths in a row inside the current step';
comment on column gen_durable.max_crashes is 'that many crashes end the instance; null: never';
comment on column gen_durable.fence is 'number of the newest claim; an outcome of an older claim changes nothing';
comment on column gen_durable.spawn_round is 'how many times it has spawned children';
comment on column gen_durable.join_round is 'the round of children that the current step waits for or was released from';
comment on column gen_durable.child_round is 'the parent''s spawn_round that made it';
comment on column gen_durable.child_index is 'its place in that round';
comment on column gen_durable.unique_scope is 'the statuses in which unique_key is occupied';
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

CREATE INDEX gen_durable_await_deadline ON gen_durable USING btree (await_deadline) WHERE (status = ANY (ARRAY['awaiting_signal'::durable_status, 'awaiting_children'::durable_status])) AND await_deadline IS NOT NULL;
CREATE INDEX gen_durable_concurrency_active ON gen_durable USING btree (concurrency_limit) WHERE status = 'executing'::durable_status AND concurrency_limit IS NOT NULL;
CREATE INDEX gen_durable_deadline ON gen_durable USING btree (deadline) WHERE (status = ANY (ARRAY['runnable'::durable_status, 'executing'::durable_status, 'awaiting_signal'::durable_status, 'awaiting_children'::durable_status])) AND deadline IS NOT NULL;
CREATE INDEX gen_durable_lane_head ON gen_durable USING btree (queue, COALESCE('p'::text || partition_key, 'c'::text || concurrency_limit, ''::text), priority, eligible_at, id) WHERE status = 'runnable'::durable_status AND (rate_limit IS NOT NULL OR concurrency_limit IS NOT NULL);
CREATE INDEX gen_durable_lease ON gen_durable USING btree (lease_expires_at) WHERE status = 'executing'::durable_status;
CREATE INDEX gen_durable_parent ON gen_durable USING btree (parent_id, child_round, child_index) WHERE parent_id IS NOT NULL;
CREATE INDEX gen_durable_partition_active ON gen_durable USING btree (partition_key) WHERE status = 'executing'::durable_status AND partition_key IS NOT NULL;
CREATE INDEX gen_durable_partition_head ON gen_durable USING btree (queue, partition_key, priority, eligible_at, id) WHERE status = 'runnable'::durable_status AND partition_key IS NOT NULL;
CREATE INDEX gen_durable_pick ON gen_durable USING btree (queue, priority, eligible_at, id) WHERE status = 'runnable'::durable_status AND partition_key IS NULL AND rate_limit IS NULL AND concurrency_limit IS NULL;
CREATE INDEX gen_durable_pick_keyed ON gen_durable USING btree (queue, priority, eligible_at, id) WHERE status = 'runnable'::durable_status AND partition_key IS NOT NULL;
CREATE INDEX gen_durable_pick_limited ON gen_durable USING btree (queue, priority, eligible_at, id) WHERE status = 'runnable'::durable_status AND (rate_limit IS NOT NULL OR concurrency_limit IS NOT NULL) AND NOT throttled;
CREATE INDEX gen_durable_promised ON gen_durable USING btree (rate_limit, eligible_at, id) WHERE status = 'runnable'::durable_status AND throttled;
CREATE INDEX gen_durable_throttled ON gen_durable USING btree (queue, eligible_at, id) WHERE status = 'runnable'::durable_status AND throttled;
CREATE UNIQUE INDEX gen_durable_unique ON gen_durable USING btree (unique_guard) WHERE unique_guard IS NOT NULL;

create table limiters (
  kind text not null,
  name text not null,
  allowed integer not null,
  period interval,
  burst integer,
  updated_at timestamp with time zone not null default now(),
  constraint limiters_pkey PRIMARY KEY (kind, name),
  constraint limiters_allowed_check CHECK (allowed >= 1),
  constraint limiters_check CHECK (kind <> 'rate'::text OR period > '00:00:00'::interval AND burst >= 1),
  constraint limiters_kind_check CHECK (kind = ANY (ARRAY['rate'::text, 'concurrency'::text]))
);
comment on column limiters.allowed is 'rate: tokens per period; concurrency: executions at once';

create table paused_queues (
  queue text not null,
  paused_at timestamp with time zone not null default now(),
  constraint paused_queues_pkey PRIMARY KEY (queue)
);

create table schedules (
  name text not null,
  last_tick timestamp with time zone not null,
  updated_at timestamp with time zone not null default now(),
  constraint schedules_pkey PRIMARY KEY (name)
);
comment on column schedules.last_tick is 'the newest tick that has its instance; the next one is later';

create table signals (
  id bigint not null generated always as identity,
  target_id bigint not null,
  name text not null,
  payload jsonb not null default '{}'::jsonb,
  dedup_key text,
  inserted_at timestamp with time zone not null default now(),
  constraint signals_pkey PRIMARY KEY (id),
  constraint signals_target_id_dedup_key_key UNIQUE (target_id, dedup_key),
  constraint signals_target_id_fkey FOREIGN KEY (target_id) REFERENCES gen_durable(id) ON DELETE CASCADE
);

CREATE INDEX signals_target ON signals USING btree (target_id, name);

create table workers (
  id text not null,
  name text not null,
  host text not null,
  pid integer not null,
  queues jsonb not null,
  machines text[] not null,
  started_at timestamp with time zone not null default now(),
  beat_at timestamp with time zone not null default now(),
  expires_at timestamp with time zone not null,
  constraint workers_pkey PRIMARY KEY (id)
);

comment on table workers is 'one row per worker process; it lives while expires_at lies ahead';
