-- carry_on: Next of an inline machine. At another step, and still claimed by the same worker.
-- The fence moves on all the same: a late repetition of this very commit must find that it is too late.
-- The lease is the heartbeat's: no column of an index changes, so that the update stays within its page.
update gen_durable g
set step = t.step,
    state = t.state::jsonb,
    fence = g.fence + 1,
    attempt = 0,
    crashes = 0,
    last_error = t.error,
    awaits = null,
    join_round = null,
    updated_at = statement_timestamp()
from unnest(%(ids)s::bigint[], %(fences)s::bigint[], %(steps)s::text[], %(states)s::text[], %(errors)s::text[])
     as t (id, fence, step, state, error)
where g.id = t.id and g.fence = t.fence and g.status::text = 'executing'
returning g.id
