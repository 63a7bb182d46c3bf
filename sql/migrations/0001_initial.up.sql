-- 0001: instances, their inbox, and the indexes that claims, leases, barriers and deadlines live on.

create type durable_status as enum
  ('runnable', 'executing', 'awaiting_signal', 'awaiting_children', 'done', 'failed');

create table gen_durable (
  id               bigint generated always as identity primary key,
  fsm              text not null,
  fsm_version      int not null default 1,
  step             text not null,
  status           durable_status not null default 'runnable',
  state            jsonb not null default '{}',
  result           jsonb,

  -- when and where it runs
  queue            text not null default 'default',
  priority         smallint not null default 0,
  partition_key    text,
  eligible_at      timestamptz not null default now(),

  -- how the current step has fared
  attempt          int not null default 0,
  crashes          int not null default 0,
  max_crashes      int default 20,
  last_error       text,

  -- who holds it
  locked_by        text,
  lease_expires_at timestamptz,
  fence            bigint not null default 0,

  -- what it waits for
  awaits           text[],
  await_deadline   timestamptz,
  children_pending int not null default 0,
  spawn_round      int not null default 0,
  join_round       int,

  -- whose child it is
  parent_id        bigint references gen_durable (id) on delete set null,
  child_round      int,
  child_index      int,

  -- uniqueness
  unique_key       bytea,
  unique_scope     durable_status[] not null default '{}',
  unique_guard     bytea generated always as
    (case when unique_key is not null and status = any (unique_scope) then unique_key end) stored,

  inserted_at      timestamptz not null default now(),
  updated_at       timestamptz not null default now(),

  -- A row that could leave its scope and come back while it lives would meet the key's new holder there, and the claim,
  -- sweep or join that moved it would fail for all the others in its batch.
  constraint gen_durable_scope_without_holes
    check (unique_scope = '{}' or unique_scope @> '{runnable,executing,awaiting_signal,awaiting_children}')
);

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

-- The claim reads due rows of one queue already in order and stops at its limit. Rows with a partition key stand in an
-- index of their own: a deep backlog of one key must not lie in the way of rows that have none.
create index gen_durable_pick on gen_durable (queue, priority, eligible_at, id)
  where status = 'runnable' and partition_key is null;

create index gen_durable_pick_keyed on gen_durable (queue, priority, eligible_at, id)
  where status = 'runnable' and partition_key is not null;

-- From key to key within a queue, and the first due row of each.
create index gen_durable_partition_head on gen_durable (queue, partition_key, priority, eligible_at, id)
  where status = 'runnable' and partition_key is not null;

-- Is a partition key busy?
create index gen_durable_partition_active on gen_durable (partition_key)
  where status = 'executing' and partition_key is not null;

create index gen_durable_lease on gen_durable (lease_expires_at)
  where status = 'executing';

create index gen_durable_await_deadline on gen_durable (await_deadline)
  where status = 'awaiting_signal' and await_deadline is not null;

-- Partial on purpose: a full unique index over a changing column would make every update of it
-- exclude the foreign-key check of a signal on its way in.
create unique index gen_durable_unique on gen_durable (unique_guard)
  where unique_guard is not null;

create index gen_durable_parent on gen_durable (parent_id, child_round, child_index)
  where parent_id is not null;

create table signals (
  id          bigint generated always as identity primary key,
  target_id   bigint not null references gen_durable (id) on delete cascade,
  name        text not null,
  payload     jsonb not null default '{}',
  dedup_key   text,
  inserted_at timestamptz not null default now(),
  unique (target_id, dedup_key)
);

create index signals_target on signals (target_id, name);

-- Worker processes, for people and for `status`: the engine itself trusts leases alone.
create table workers (
  id         text primary key,
  name       text not null,
  host       text not null,
  pid        int not null,
  queues     jsonb not null,
  machines   text[] not null,
  started_at timestamptz not null default now(),
  beat_at    timestamptz not null default now(),
  expires_at timestamptz not null
);

comment on table workers is 'one row per worker process; it lives while expires_at lies ahead';
