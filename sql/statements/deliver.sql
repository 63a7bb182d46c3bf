-- deliver: put a signal into a live instance's inbox and wake the instance if it waits for that name.
-- Runs after lock_target in the same transaction, so its snapshot is newer than any park it had to wait for.
-- A duplicate inserts nothing and therefore wakes nobody, under whatever name it comes.
with target as (
  select id, status, awaits
  from gen_durable
  where id = %(id)s and status in ('runnable', 'executing', 'awaiting_signal', 'awaiting_children')
), duplicate as (
  select s.id from signals s where s.target_id = %(id)s and s.dedup_key = %(dedup_key)s
), room as (
  select count(*) < %(inbox_limit)s as is_left
  from (select 1 from signals where target_id = %(id)s limit %(inbox_limit)s) as held
), stored as (
  insert into signals (target_id, name, payload, dedup_key)
  select target.id, %(name)s, %(payload)s::jsonb, %(dedup_key)s
  from target
  cross join room
  where room.is_left
  on conflict (target_id, dedup_key) do nothing
  returning id
), woken as (
  update gen_durable g
  set status = 'runnable',
      eligible_at = statement_timestamp() + %(ahead)s::interval,
      await_deadline = null,
      updated_at = statement_timestamp()
  from target
  cross join stored
  where g.id = target.id and target.status = 'awaiting_signal' and %(name)s = any (target.awaits)
  returning g.id
)
select exists (select from target) as found,
       coalesce((select id from duplicate), (select id from stored)) as id,
       exists (select from duplicate) as duplicate,
       exists (select from woken) as woke
