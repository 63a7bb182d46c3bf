-- Four roles for four kinds of programs, each with what it needs and no more. May be run again at any time.
--
--   gendurable_owner     owns the schema and its tables; runs `gendurable migrate`, nothing else
--   gendurable_worker    reads and writes rows, changes no table; runs `worker`, `retry` and `gc`
--   gendurable_producer  your application: inserts instances and signals them; sees no state, no result, no payload
--   gendurable_observer  reads everything, changes nothing; `status`, `list`, `get`, and autoscalers
--
-- Run it as a superuser, in the database that is to hold the tables:
--
--   psql -d shop -f roles.sql                                              roles, schema, rights on tables to come
--   gendurable migrate up --schema gendurable --dsn postgresql://gendurable_owner@…/shop
--   psql -d shop -f roles.sql                                              the producer's rights, column by column
--
-- A migration that adds columns wants the third line again. The roles have no passwords yet, so that nobody can log in
-- with one: set them with \password. Other names, another schema: replace them in this file.

begin;

do $$
declare
  name text;
begin
  foreach name in array array['gendurable_owner', 'gendurable_worker', 'gendurable_producer', 'gendurable_observer'] loop
    if not exists (select from pg_roles where rolname = name) then
      execute format('create role %I login', name);
    end if;
    -- Behind a pooler a session may be one that no client has set up: our tables are found there all the same.
    execute format('alter role %I in database %I set search_path to gendurable, pg_temp', name, current_database());
  end loop;
end
$$;

create schema if not exists gendurable authorization gendurable_owner;
grant usage on schema gendurable to gendurable_worker, gendurable_producer, gendurable_observer;

-- Tables that are there, and those that later migrations will make.
grant select, insert, update, delete on all tables in schema gendurable to gendurable_worker;
grant select on all tables in schema gendurable to gendurable_observer;
alter default privileges for role gendurable_owner in schema gendurable
  grant select, insert, update, delete on tables to gendurable_worker;
alter default privileges for role gendurable_owner in schema gendurable
  grant select on tables to gendurable_observer;

do $$
begin
  if to_regclass('gendurable.gen_durable') is null then
    raise notice 'there are no tables yet: run `gendurable migrate up` as gendurable_owner, then this file again';
    return;
  end if;
  -- What a new row is made of; whoever runs it, and how it fares, is not the producer's to say.
  grant insert (fsm, fsm_version, step, state, queue, priority, partition_key, unique_key, unique_scope, max_crashes,
                eligible_at, rate_limit, weight, concurrency_limit, deadline, retry, on_cancel)
    on gendurable.gen_durable to gendurable_producer;
  -- Who holds a unique key, and what an instance waits for.
  grant select (id, status, awaits, unique_guard) on gendurable.gen_durable to gendurable_producer;
  -- Which limits there are.
  grant select on gendurable.limiters to gendurable_producer;
  -- A signal wakes its instance.
  grant update (status, eligible_at, await_deadline, updated_at) on gendurable.gen_durable to gendurable_producer;
  grant insert (target_id, name, payload, dedup_key) on gendurable.signals to gendurable_producer;
  grant select (id, target_id, dedup_key) on gendurable.signals to gendurable_producer;
end
$$;

commit;
