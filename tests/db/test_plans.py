"""What the hot statements read of a large table: by which index, in which order, and how much.

Plans are walked as JSON, after running. Each statement is explained as a custom plan (parameters known), as a generic
one (what a prepared statement becomes) and as a worker's own connections have it, which leave the planner less choice.
The table holds far more rows than any statement should look at: a plan that reads in proportion to them fails here.
"""

import re
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from datetime import timedelta
from typing import Any

import psycopg
import pytest
from attrs import frozen

from gendurable import migrate
from gendurable.core.duration import ZERO
from gendurable.core.instance import new_instance
from gendurable.core.status import Status
from gendurable.core.transition import Advance, CarryOn, Finish, Park, Repeat, SpawnChildren
from gendurable.db import store
from gendurable.db.connection import Connection, Database

MINUTE = timedelta(minutes=1)
BATCH = 50
# Pages that a statement may touch: for each row its own page and a way down each index that it leaves or enters, and a
# little for the table's growth. Walking one of the backlogs takes more than that.
PAGES_PER_ROW = 40
PAGES_BESIDES = 200
# A statement that finds nothing to do goes down each index that it asks, no further.
PAGES_FOR_NOTHING = 30

FINISHED = """
insert into gen_durable (fsm, step, queue, status, result)
  select 'f', 's', 'plain', 'done', '{}' from generate_series(1, 40000);
insert into gen_durable (fsm, step, queue, status, parent_id, child_round, child_index)
  select 'f', 's', 'plain', 'done', g.id, 1, n
  from gen_durable g, generate_series(0, 9) n
  where g.id <= (select min(id) + 2000 from gen_durable)
"""
IN_PROGRESS = """
insert into gen_durable
  (fsm, step, queue, status, partition_key, locked_by, lease_expires_at, fence, parent_id, child_round, child_index)
  select 'f', 's', 'plain', 'executing', case when id % 2 = 0 then 'busy ' || id end, 'w',
         now() + interval '1 hour' + id * interval '1 s', 1, id, 2, 0
  from gen_durable
  where parent_id is null and status = 'done'
  order by id
  limit 3000;
insert into signals (target_id, name)
  select id, 'n' from gen_durable, generate_series(1, 3) where status = 'executing';
insert into gen_durable (fsm, step, queue, status, awaits, await_deadline, deadline, unique_key, unique_scope)
  select 'f', 's', 'plain', 'awaiting_signal', '{n}', now() + interval '1 hour' + n * interval '1 s',
         now() + interval '2 hours' + n * interval '1 s', n::text::bytea,
         '{runnable,executing,awaiting_signal,awaiting_children}'
  from generate_series(1, 5000) n
"""
BACKLOGS = """
-- Without keys; of as many keys as rows; of a hundred keys.
insert into gen_durable (fsm, step, queue, priority, eligible_at)
  select 'f', 's', 'plain', n % 3, now() - interval '1 hour' + n * interval '1 ms' from generate_series(1, 20000) n;
insert into gen_durable (fsm, step, queue, eligible_at, partition_key)
  select 'f', 's', 'keys', now() - interval '1 hour' + n * interval '1 ms', 'key ' || n
  from generate_series(1, 20000) n;
insert into gen_durable (fsm, step, queue, eligible_at, partition_key)
  select 'f', 's', 'few keys', now() - interval '1 hour' + n * interval '1 ms', 'few ' || n % 100
  from generate_series(1, 20000) n;
-- A busy key, whose siblings stand in front of everything else.
insert into gen_durable (fsm, step, queue, status, partition_key, locked_by, lease_expires_at)
  values ('f', 's', 'hot', 'executing', 'hot', 'w', now() + interval '1 hour');
insert into gen_durable (fsm, step, queue, eligible_at, partition_key)
  select 'f', 's', 'hot', now() - interval '1 hour' + n * interval '1 ms', 'hot' from generate_series(1, 15000) n;
insert into gen_durable (fsm, step, queue) select 'f', 's', 'hot' from generate_series(1, 1000);
insert into gen_durable (fsm, step, queue, partition_key) select 'f', 's', 'hot', 'cool ' || n from generate_series(1, 1000) n;
-- More urgent than the rest, but not before tomorrow.
insert into gen_durable (fsm, step, queue, priority, eligible_at)
  select 'f', 's', 'future', -1, now() + interval '1 day' + n * interval '1 ms' from generate_series(1, 100000) n;
insert into gen_durable (fsm, step, queue) select 'f', 's', 'future' from generate_series(1, 1000)
"""


# Either finds the inbox of an instance; which of them costs less is a matter of a page.
BY_TARGET = {"signals_target", "signals_target_id_dedup_key_key"}


@frozen
class Plan:
    """A plan that was run."""

    top: dict[str, Any]

    def nodes(self) -> Iterator[dict[str, Any]]:
        waiting = [self.top]
        while waiting:
            node = waiting.pop()
            yield node
            waiting += node.get("Plans", [])

    @property
    def pages(self) -> int:
        return self.top["Shared Hit Blocks"] + self.top["Shared Read Blocks"]

    @property
    def indexes(self) -> set[str]:
        return {node["Index Name"] for node in self.nodes() if "Index Name" in node}

    @property
    def scanned_whole(self) -> list[str]:
        return [node["Relation Name"] for node in self.nodes() if node["Node Type"] == "Seq Scan"]

    @property
    def most_sorted(self) -> int:
        """The most rows that a sort was given."""
        sorts = [node for node in self.nodes() if "Sort" in node["Node Type"]]
        return max((int(node["Plans"][0]["Actual Rows"]) for node in sorts), default=0)

    @property
    def hashed(self) -> list[str]:
        texts = [text for node in self.nodes() for text in node.values() if isinstance(text, str)]
        return [text for text in texts if "hashed SubPlan" in text]

    def rows_by(self, index: str) -> int:
        """How many rows an index gave, those included that a filter then threw away."""
        scans = [node for node in self.nodes() if node.get("Index Name") == index]
        thrown_away = "Rows Removed by Filter"
        return sum(int((scan["Actual Rows"] + scan.get(thrown_away, 0)) * scan["Actual Loops"]) for scan in scans)


class Explainer:
    """Stands in for a connection: explains what a function of the store would run, runs it, and takes it back."""

    def __init__(self, conn: Connection) -> None:
        self._cursor = psycopg.ClientCursor(conn)  # EXECUTE takes no parameters but literals

    def cursor(self, **_: Any) -> "Explainer":
        return self

    def execute(self, query: bytes, parameters: dict[str, Any]) -> "Explainer":
        numbers: dict[str, int] = {}

        def number(match: re.Match[str]) -> str:
            return f"${numbers.setdefault(match[1], len(numbers) + 1)}"

        text = re.sub(r"%\((\w+)\)s", number, query.decode())
        values = ", ".join(["%s"] * len(numbers))
        run = self._cursor.execute
        run("begin")
        run(f"prepare explained as {text}")
        run(f"explain (analyze, buffers, format json) execute explained ({values})", [parameters[n] for n in numbers])
        [[[answer]]] = self._cursor.fetchall()
        run("rollback")
        run("deallocate explained")
        self.plan = Plan(answer["Plan"])
        return self


class Explain:
    """Explains calls of the store's functions, in one mode of planning."""

    def __init__(self, conn: Connection) -> None:
        self.conn = conn

    def __call__(self, function: Callable[..., object], *args: Any, **kwargs: Any) -> Plan:
        explainer = Explainer(self.conn)
        function(explainer, *args, **kwargs)
        return explainer.plan

    def ids(self, where: str, limit: int = BATCH) -> list[int]:
        rows = self.conn.execute(f"select id from gen_durable where {where} order by id limit {limit}").fetchall()
        assert rows, f"the table has no row where {where}"
        return [id for (id,) in rows]


@contextmanager
def explaining(dsn: str, mode: str, schema: str = "public") -> Iterator[Explain]:
    with closing(Database(dsn, schema).connect("explain", steady=mode == "steady")) as conn:
        if mode != "steady":
            conn.execute(f"set plan_cache_mode = force_{mode}_plan")
        yield Explain(conn)


@pytest.fixture(scope="module")
def large(module_database: str) -> str:
    """A database whose tables are large and analyzed."""
    migrate.up(module_database)
    fill(module_database, "public", [FINISHED, IN_PROGRESS, BACKLOGS, "vacuum analyze gen_durable, signals"])
    return module_database


def fill(dsn: str, schema: str, parts: list[str]) -> None:
    with closing(Database(dsn, schema).connect("fill")) as conn:
        # Statistics come when the test says so, and not in between.
        conn.execute("alter table gen_durable set (autovacuum_enabled = off)")
        conn.execute("alter table signals set (autovacuum_enabled = off)")
        for part in parts:
            conn.execute(part)


@pytest.fixture(params=["custom", "generic", "steady"])
def explain(large: str, request: pytest.FixtureRequest) -> Iterator[Explain]:
    with explaining(large, request.param) as explain:
        yield explain


def pages_for(rows: int) -> int:
    return PAGES_BESIDES + rows * PAGES_PER_ROW


def check_order(plan: Plan, window: int) -> None:
    """Nothing of a backlog was read but a window of it, in order."""
    assert "gen_durable" not in plan.scanned_whole
    assert plan.most_sorted <= window
    assert plan.hashed == []


# Claiming.

CLAIM = {"machines": ["f@1", "g@1"], "worker": "w", "lease": MINUTE}


@pytest.mark.parametrize("limit", [1, 10, BATCH, 500])
@pytest.mark.parametrize("claim", [store.claim, store.claim_plain])
def test_a_claim_reads_rows_without_keys_in_order_and_stops_at_its_limit(
    explain: Explain, claim: Callable[..., object], limit: int
):
    plan = explain(claim, queue="plain", limit=limit, **CLAIM)
    assert plan.top["Actual Rows"] == limit
    check_order(plan, window=limit)
    assert plan.rows_by("gen_durable_pick") == limit
    assert plan.pages <= pages_for(limit)


@pytest.mark.parametrize("limit", [1, 10, BATCH, 500])
@pytest.mark.parametrize("queue", ["keys", "few keys", "hot"])
def test_a_claim_reads_a_window_of_the_rows_with_keys(explain: Explain, queue: str, limit: int):
    window = 2 * limit + BATCH
    plan = explain(store.claim, queue=queue, limit=limit, **CLAIM)
    assert plan.top["Actual Rows"] == min(limit, 100 if queue == "few keys" else limit)
    check_order(plan, window)
    assert plan.rows_by("gen_durable_pick_keyed") <= window
    assert plan.pages <= pages_for(window)


@pytest.mark.parametrize("queue", ["hot", "future"])
def test_what_cannot_run_yet_hardly_slows_down_what_can(explain: Explain, queue: str):
    free = explain(store.claim, queue="plain", limit=BATCH, **CLAIM)
    encumbered = explain(store.claim, queue=queue, limit=BATCH, **CLAIM)
    assert encumbered.top["Actual Rows"] == BATCH
    assert encumbered.pages <= 3 * free.pages


@pytest.mark.parametrize("claim", [store.claim, store.claim_plain])
def test_a_claim_that_finds_nothing_reads_next_to_nothing(explain: Explain, claim: Callable[..., object]):
    plan = explain(claim, queue="empty", limit=BATCH, **CLAIM)
    assert plan.pages <= PAGES_FOR_NOTHING


def test_a_claim_for_machines_that_are_not_due_passes_others_by_in_order(explain: Explain):
    plan = explain(store.claim, queue="plain", limit=BATCH, **{**CLAIM, "machines": ["absent@1"]})
    assert plan.top["Actual Rows"] == 0
    assert plan.most_sorted == 0


@pytest.mark.parametrize("claim", [store.claim, store.claim_plain])
@pytest.mark.parametrize("queue", ["plain", "keys", "empty"])
def test_a_claim_asks_once_whether_its_queue_is_paused(explain: Explain, claim: Callable[..., object], queue: str):
    plan = explain(claim, queue=queue, limit=BATCH, **CLAIM)
    probes = [node for node in plan.nodes() if node.get("Relation Name") == "paused_queues"]
    assert [(node["Actual Loops"], node["Actual Rows"]) for node in probes] == [(1, 0)]


@pytest.mark.parametrize("claim", [store.claim, store.claim_plain])
def test_a_claim_of_a_paused_queue_reads_nothing_of_its_backlog(large: str, claim: Callable[..., object]):
    with explaining(large, "steady") as explain:
        explain.conn.execute("insert into paused_queues values ('hot')")
        plan = explain(claim, queue="hot", limit=BATCH, **CLAIM)
        explain.conn.execute("delete from paused_queues")
    assert plan.top["Actual Rows"] == 0
    assert plan.pages <= PAGES_FOR_NOTHING


# Outcomes.


@frozen
class Held:
    id: int
    fence: int = 1


NEW = new_instance(fsm="f", fsm_version=1, step="s", state="{}", queue="children", max_crashes=3)
OUTCOMES: dict[str, Callable[[int], object]] = {
    "advance": lambda row: Advance(row, 1, "s", "{}", ZERO, (1, 2)),
    "carry_on": lambda row: CarryOn(row, 1, "s", "{}"),
    "repeat": lambda row: Repeat(row, 1, "{}", ZERO, 1),
    "park": lambda row: Park(row, 1, "s", "{}", '["n"]', MINUTE, ()),
    "recheck_parked": lambda row: Park(row, 1, "s", "{}", '["n"]', MINUTE, ()),
    "spawn": lambda row: SpawnChildren(row, 1, "s", "{}", (NEW, NEW), (1, 2)),
    "finish": lambda row: Finish(row, 1, Status.DONE, "{}", None),
    "lock_claims": Held,
    "release": Held,
    "extend_leases": Held,
    "find_lost": Held,
}


def outcome_plan(explain: Explain, name: str) -> Plan:
    claims = [OUTCOMES[name](id) for id in explain.ids("status = 'executing' and fence = 1")]
    assert len(claims) == BATCH
    more = {"lease": MINUTE} if name == "extend_leases" else {}
    return explain(getattr(store, name), claims, **more)


def check_by_primary_key(plan: Plan) -> None:
    assert plan.scanned_whole == []
    assert "gen_durable_pkey" in plan.indexes
    assert plan.indexes <= {"gen_durable_pkey", "signals_pkey", "buckets_pkey", *BY_TARGET}
    assert plan.rows_by("gen_durable_pkey") <= 4 * BATCH  # own rows, twice where they are locked first, and parents
    assert plan.pages <= pages_for(BATCH)


@pytest.mark.parametrize("name", OUTCOMES)
def test_outcomes_and_leases_go_by_primary_key(explain: Explain, name: str):
    check_by_primary_key(outcome_plan(explain, name))


@pytest.fixture(scope="module", params=["no", "old"])
def ill_informed(request: pytest.FixtureRequest, large: str) -> tuple[str, str]:
    """A schema with many rows of which the planner knows nothing, or what was true when there were few."""
    schema = f"{request.param} statistics"
    migrate.up(large, schema=schema)
    few = "insert into gen_durable (fsm, step, status) select 'f', 's', 'done' from generate_series(1, 100)"
    before = [few, "analyze gen_durable, signals"] if request.param == "old" else []
    fill(large, schema, [*before, FINISHED, IN_PROGRESS])
    return large, schema


@pytest.mark.parametrize("mode", ["custom", "generic", "steady"])
@pytest.mark.parametrize("name", OUTCOMES)
def test_outcomes_and_leases_go_by_primary_key_whatever_the_statistics(
    ill_informed: tuple[str, str], mode: str, name: str
):
    dsn, schema = ill_informed
    with explaining(dsn, mode, schema) as explain:
        check_by_primary_key(outcome_plan(explain, name))


# Keeping order.


def test_the_reaper_reads_expired_leases_and_no_others(explain: Explain):
    plan = explain(store.reap, worker="r", limit=BATCH, lease=MINUTE, ahead=timedelta(days=1))
    assert plan.top["Actual Rows"] == BATCH
    check_order(plan, window=BATCH)
    assert plan.rows_by("gen_durable_lease") == BATCH
    nothing = explain(store.reap, worker="r", limit=BATCH, lease=MINUTE)
    assert nothing.top["Actual Rows"] == 0
    assert nothing.pages <= PAGES_FOR_NOTHING


def test_await_deadlines_are_read_in_order(explain: Explain):
    plan = explain(store.expire_awaits, limit=BATCH, ahead=timedelta(days=1))
    assert plan.top["Actual Rows"] == BATCH
    check_order(plan, window=BATCH)
    assert plan.rows_by("gen_durable_await_deadline") == BATCH
    nothing = explain(store.expire_awaits, limit=BATCH)
    assert nothing.top["Actual Rows"] == 0
    assert nothing.pages <= PAGES_FOR_NOTHING


def test_deadlines_of_instances_are_read_in_order(explain: Explain):
    plan = explain(store.find_overdue, limit=BATCH, ahead=timedelta(days=1))
    assert plan.top["Actual Rows"] == BATCH
    check_order(plan, window=BATCH)
    assert plan.rows_by("gen_durable_deadline") == BATCH
    nothing = explain(store.find_overdue, limit=BATCH)
    assert nothing.top["Actual Rows"] == 0
    assert nothing.pages <= PAGES_FOR_NOTHING


def test_a_sweep_that_has_nothing_to_do_reads_next_to_nothing(explain: Explain):
    nothing = explain(store.deadlines_passed)
    assert nothing.rows_by("gen_durable_await_deadline") == nothing.rows_by("gen_durable_deadline") == 0
    assert nothing.pages <= PAGES_FOR_NOTHING


@pytest.mark.parametrize("lock", [store.lock_instances, store.lock_free_instances])
def test_what_is_ended_from_outside_is_found_by_its_id(explain: Explain, lock: Callable[..., object]):
    ids = explain.ids("status = 'awaiting_signal'")
    for plan in (explain(lock, ids=ids), explain(store.seize, ids=ids, reason="why")):
        assert plan.top["Actual Rows"] == len(ids)
        assert "gen_durable" not in plan.scanned_whole


def test_garbage_is_found_by_walking_on_from_where_the_last_batch_stopped(explain: Explain):
    [middle] = explain.ids("status = 'done' and parent_id is not null and child_index = 5 limit 1 offset 1000 --", 1)
    plan = explain(store.gc, older_than=ZERO, after=middle, limit=BATCH)
    assert plan.top["Actual Rows"] == BATCH
    check_order(plan, window=BATCH)
    assert plan.pages <= pages_for(BATCH)


# Clients, and what a step is shown.


def test_a_signal_finds_its_target_and_its_duplicates_by_index(explain: Explain):
    [id] = explain.ids("status = 'awaiting_signal'", 1)
    sending = {"id": id, "name": "n", "payload": "{}", "dedup_key": "k", "inbox_limit": 10_000}
    for plan in (explain(store.lock_target, id=id), explain(store.deliver, **sending)):
        assert plan.scanned_whole == []
        assert plan.indexes <= {"gen_durable_pkey", *BY_TARGET}
        assert plan.pages <= pages_for(1)


def test_inboxes_are_read_by_target(explain: Explain):
    plan = explain(store.load_signals, ids=explain.ids("status = 'executing' and fence = 1"))
    assert plan.top["Actual Rows"] == 3 * BATCH
    assert plan.indexes <= BY_TARGET
    assert plan.scanned_whole == []
    assert plan.pages <= pages_for(BATCH)


def test_children_are_read_by_parent(explain: Explain):
    parents = explain.ids("parent_id is null and status = 'done'")
    plan = explain(store.load_children, ids=parents)
    assert plan.top["Actual Rows"] == 11 * BATCH
    assert plan.indexes == {"gen_durable_parent"}
    assert plan.scanned_whole == []
    assert plan.pages <= pages_for(11 * BATCH)


def test_a_unique_key_and_an_id_are_found_by_index(explain: Explain):
    plans = {
        "gen_durable_unique": explain(store.find_occupant, unique_key=b"7"),
        "gen_durable_pkey": explain(store.get_status, id=1),
    }
    for index, plan in plans.items():
        assert plan.indexes == {index}
        assert plan.pages <= PAGES_FOR_NOTHING


def test_those_who_wait_are_answered_by_primary_key(explain: Explain):
    plan = explain(store.get_statuses, ids=explain.ids("status = 'executing'"))
    assert plan.top["Actual Rows"] == BATCH
    assert (plan.indexes, plan.scanned_whole) == ({"gen_durable_pkey"}, [])
    assert plan.pages <= pages_for(BATCH)


def test_a_worker_finds_out_by_index_whether_a_key_is_busy(large: str):
    # Not as a custom plan: told that the key is a frequent one, the planner would look through all that executes.
    with explaining(large, "steady") as explain:
        plan = explain(store.find_siblings, keys=["hot"], ids=[1])
    assert plan.indexes == {"gen_durable_partition_active"}
    assert plan.pages <= PAGES_FOR_NOTHING


# Would these tests notice?

NAIVE = b"""
select g.id
from gen_durable g
where g.status = 'runnable'
  and g.queue = any (%(queues)s::text[])
  and g.eligible_at <= now()
  and (g.partition_key is null
       or not exists (select from gen_durable busy
                      where busy.status = 'executing' and busy.partition_key = g.partition_key))
order by g.priority, g.eligible_at, g.id
limit %(limit)s
"""


def test_a_claim_as_one_would_first_write_it_does_not_pass(explain: Explain):
    plan = explain(lambda conn, **given: conn.cursor().execute(NAIVE, given), queues=["plain", "hot"], limit=BATCH)
    assert plan.top["Actual Rows"] == BATCH
    assert plan.most_sorted > 1000, "it sorts the backlog"
    assert plan.hashed, "and looks through all that executes, to be sure about each key"
    assert plan.pages > pages_for(2 * BATCH)
