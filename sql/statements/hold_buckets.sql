-- hold_buckets: hold buckets until the transaction ends, those that nobody else holds. Waits for nobody.
-- Marked with the transaction, so that the statements that follow know which they are; and they must follow: only their
-- snapshot is newer than the lock, and shows what the last holder has taken.
with free as (
  select b.kind, b.key
  from unnest(%(kinds)s::text[], %(keys)s::text[]) as wanted (kind, key)
  join buckets b on b.kind = wanted.kind and b.key = wanted.key
  order by b.kind, b.key
  for no key update of b skip locked
)
update buckets b
set held_by = pg_current_xact_id(),
    refilled_at = case b.kind when 'rate' then b.refilled_at else statement_timestamp() + %(ahead)s::interval end
from free
where b.kind = free.kind and b.key = free.key
returning b.key
