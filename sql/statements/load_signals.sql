-- load_signals: the inboxes of some instances, oldest signal first.
-- Payload and time travel as text: a value that cannot be decoded must hurt its own instance only.
select s.id, s.target_id, s.name, s.payload::text as payload, s.dedup_key, s.inserted_at::text as inserted_at
from signals s
where s.target_id = any (%(ids)s::bigint[])
order by s.target_id, s.id
