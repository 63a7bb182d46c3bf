-- repeat: Retry and Again. The same step again with the same inputs: awaits stay, nothing is consumed.
-- Retry counts as an attempt, Again does not. Without an error of its own either keeps the error that stands.
update gen_durable g
set status = 'runnable',
    state = t.state::jsonb,
    eligible_at = statement_timestamp() + %(ahead)s::interval + t.delay,
    attempt = g.attempt + t.attempts,
    crashes = 0,
    last_error = coalesce(t.error, g.last_error),
    locked_by = null,
    lease_expires_at = null,
    updated_at = statement_timestamp()
from unnest(%(ids)s::bigint[], %(fences)s::bigint[], %(states)s::text[],
            %(delays)s::interval[], %(attempts)s::int[], %(errors)s::text[])
     as t (id, fence, state, delay, attempts, error)
where g.id = t.id and g.fence = t.fence and g.status::text = 'executing'
returning g.id
