-- seize: take live instances away from whoever has them, to end them from outside.
-- Their rows are locked already, and finish follows in the same transaction: so inbox, parent and barrier are treated
-- in one place, and nobody ever sees them seized. The fence moves on: an outcome under way finds itself stale.
update gen_durable g
set status = 'executing',
    fence = g.fence + 1,
    cancel_reason = coalesce(%(reason)s::text, g.cancel_reason),
    updated_at = statement_timestamp()
where g.id = any (%(ids)s::bigint[])
returning g.id
