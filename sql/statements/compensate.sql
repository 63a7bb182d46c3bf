-- compensate: cancel live instances whose machine has a hook for that: it runs next, in place of the step.
-- Their rows are locked already. The fence moves on: an outcome under way finds itself stale. Whatever they waited for,
-- they wait no longer; the inbox and the round of children stay, for the hook to see. Children of later rounds are the
-- compensation's own, and no cascade touches them.
update gen_durable g
set status = 'runnable',
    cancelling = true,
    cancel_reason = %(reason)s,
    cancel_round = g.spawn_round,
    fence = g.fence + 1,
    attempt = 0,
    crashes = 0,
    eligible_at = statement_timestamp() + %(ahead)s::interval,
    awaits = null,
    await_deadline = null,
    children_pending = 0,
    fail_fast = false,
    rate_limit = null,
    weight = 1,
    throttled = false,
    concurrency_limit = null,
    locked_by = null,
    lease_expires_at = null,
    updated_at = statement_timestamp()
where g.id = any (%(ids)s::bigint[])
returning g.id
