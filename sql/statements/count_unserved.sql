-- count_unserved: due rows that no live worker has the code for; they stay untouched until one has.
select g.fsm, g.fsm_version, count(*) as count
from gen_durable g
where g.status = 'runnable' and g.eligible_at <= statement_timestamp()
  and not exists (
    select from workers w
    where w.expires_at > statement_timestamp() and g.fsm || '@' || g.fsm_version = any (w.machines)
  )
group by g.fsm, g.fsm_version
order by g.fsm, g.fsm_version
