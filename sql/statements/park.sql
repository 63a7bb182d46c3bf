-- park: Await. Parked until a signal of one of the names arrives or the deadline passes; consumes nothing.
-- Always followed by recheck_parked in the same transaction.
update gen_durable g
set status = 'awaiting_signal',
    step = t.step,
    state = t.state::jsonb,
    awaits = array(select jsonb_array_elements_text(t.names::jsonb)),
    await_deadline = statement_timestamp() + %(ahead)s::interval + t.timeout,
    attempt = t.attempt,
    crashes = 0,
    last_error = t.error,
    join_round = null,
    fail_fast = false,
    cancelling = false,
    rate_limit = null,
    weight = 1,
    concurrency_limit = null,
    locked_by = null,
    lease_expires_at = null,
    updated_at = statement_timestamp()
from unnest(%(ids)s::bigint[], %(fences)s::bigint[], %(steps)s::text[], %(states)s::text[], %(names)s::text[],
            %(timeouts)s::interval[], %(errors)s::text[], %(attempts)s::int[])
       as t (id, fence, step, state, names, timeout, error, attempt)
where g.id = t.id and g.fence = t.fence and g.status::text = 'executing'
returning g.id
