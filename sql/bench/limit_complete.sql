-- limit_complete: the barest completion: no fence, no inbox, no parent.
update gen_durable g
set status = 'done', result = '{}', locked_by = null, lease_expires_at = null, updated_at = now()
from unnest(%(ids)s::bigint[]) as t (id)
where g.id = t.id and g.status::text = 'executing'
