"""What the statements of limited claims read of large tables; see test_plans for how that is looked at."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest
from test_plans import BATCH, CLAIM, PAGES_FOR_NOTHING, Explain, Plan, check_order, explaining, fill

from gendurable import migrate
from gendurable.db import store
from gendurable.db.operations import LIMITED_WINDOW

LIMITERS = """
insert into limiters (kind, name, allowed, period, burst) values ('rate', 'r', 10, '1 s', 10);
insert into limiters (kind, name, allowed) values ('concurrency', 'g', 2);
insert into buckets (kind, key, tokens) select 'rate', 'r:' || n, 10 from generate_series(1, 20000) n;
insert into buckets (kind, key) select 'concurrency', 'g:' || n from generate_series(1, 5000) n;
"""
# Far more of everything than a look should see: of the past, of plain work, and of each way to have to wait.
ROWS = """
insert into gen_durable (fsm, step, queue, status, rate_limit, concurrency_limit)
  select 'f', 's', 'q', 'done', 'r:1', 'g:1' from generate_series(1, 20000);
insert into gen_durable (fsm, step, queue, eligible_at)
  select 'f', 's', queue, now() + interval '-1 hour' from generate_series(1, 10000) n,
         unnest(array['plain', 'mixed']) as queue;
insert into gen_durable (fsm, step, queue, rate_limit, throttled, eligible_at)
  select 'f', 's', queue, 'r:1', true, now() + interval '1 hour' + n * interval '0.1 s'
  from generate_series(1, 20000) n, unnest(array['throttled', 'mixed', 'crowd']) as queue;
insert into gen_durable (fsm, step, queue, rate_limit, eligible_at)
  select 'f', 's', queue, 'r:' || n, now() - interval '1 hour' + n * interval '1 ms'
  from generate_series(1, 20000) n, unnest(array['throttled', 'tenants']) as queue;
insert into gen_durable (fsm, step, queue, status, concurrency_limit, locked_by, lease_expires_at)
  select 'f', 's', 'q', 'executing', 'g:full', 'w', now() + interval '1 hour' from generate_series(1, 2);
insert into gen_durable (fsm, step, queue, status, partition_key, locked_by, lease_expires_at)
  values ('f', 's', 'q', 'executing', 'busy', 'w', now() + interval '1 hour');
insert into gen_durable (fsm, step, queue, concurrency_limit, eligible_at)
  select 'f', 's', 'crowd', 'g:full', now() - interval '1 hour' from generate_series(1, 15000) n;
insert into gen_durable (fsm, step, queue, partition_key, rate_limit, eligible_at)
  select 'f', 's', 'crowd', 'busy', 'r:2', now() - interval '1 hour' from generate_series(1, 5000) n;
insert into gen_durable (fsm, step, queue, concurrency_limit)
  select 'f', 's', 'crowd', 'g:' || n from generate_series(1, 60) n;
insert into gen_durable (fsm, step, queue, rate_limit) select 'f', 's', 'crowd', 'r:3' from generate_series(1, 60);
insert into gen_durable (fsm, step, queue, rate_limit) select 'f', 's', 'mixed', 'r:4' from generate_series(1, 60)
"""
# For each row of the window its page, and a bucket's; whatever blocks it, a way down an index.
PAGES = 12 * LIMITED_WINDOW


@pytest.fixture(scope="module")
def large(module_database: str) -> str:
    migrate.up(module_database)
    fill(module_database, "public", [LIMITERS, ROWS, "vacuum analyze gen_durable, buckets, limiters"])
    return module_database


@pytest.fixture(params=["custom", "generic", "steady"])
def explain(large: str, request: pytest.FixtureRequest) -> Iterator[Explain]:
    with explaining(large, request.param) as explain:
        yield explain


FIND = {"machines": CLAIM["machines"], "window": LIMITED_WINDOW}


def find(explain: Explain, queue: str, limit: int = BATCH) -> Plan:
    return explain(store.find_limited, queue=queue, limit=limit, **FIND)


@pytest.mark.parametrize("queue", ["plain", "empty"])
def test_a_look_where_no_row_has_a_limit_reads_next_to_nothing(explain: Explain, queue: str):
    assert find(explain, queue).pages <= PAGES_FOR_NOTHING


@pytest.mark.parametrize("limit", [1, 10, BATCH])
@pytest.mark.parametrize("queue", ["throttled", "tenants", "mixed", "crowd"])
def test_a_look_reads_a_window_in_order(explain: Explain, queue: str, limit: int):
    plan = find(explain, queue, limit)
    check_order(plan, window=LIMITED_WINDOW + limit)
    assert plan.rows_by("gen_durable_pick_limited") <= LIMITED_WINDOW
    assert plan.rows_by("gen_durable_throttled") <= LIMITED_WINDOW
    assert plan.rows_by("gen_durable_pick") <= limit
    assert plan.pages <= PAGES


def test_behind_a_window_of_blocked_rows_a_look_finds_those_that_are_not(explain: Explain):
    plan = find(explain, "crowd")
    assert plan.top["Actual Rows"] >= BATCH
    assert "gen_durable_lane_head" in plan.indexes


@pytest.mark.parametrize("mode", ["generic", "steady"])  # knowing how many keys it is given, it may read all buckets
def test_a_claim_goes_by_ids_and_keys_and_counts_by_index(large: str, mode: str):
    with explaining(large, mode) as explain:
        check_by_ids_and_keys(explain)


def check_by_ids_and_keys(explain: Explain) -> None:
    ids = explain.ids("queue = 'tenants'", limit=LIMITED_WINDOW)
    buckets = [("rate", f"r:{n}") for n in range(1, LIMITED_WINDOW)] + [("concurrency", "g:full")]
    calls: list[tuple[Callable[..., Any], list[Any], dict[str, Any]]] = [
        (store.open_buckets, [buckets], {}),
        (store.hold_buckets, [buckets], {}),
        (store.claim_limited, [ids, buckets], {"worker": "w", "limit": BATCH, "lease": CLAIM["lease"]}),
        (store.count_tokens, [ids], {}),
    ]
    for call, args, kwargs in calls:
        plan = explain(call, *args, **kwargs)
        assert set(plan.scanned_whole) <= {"limiters"}, call
        assert plan.pages <= 3 * PAGES, call


def test_promises_are_looked_at_from_bucket_to_bucket(explain: Explain):
    plan = explain(store.hasten_throttled, limit=BATCH)
    assert set(plan.scanned_whole) <= {"limiters"}
    assert plan.rows_by("gen_durable_promised") <= 10 * BATCH
