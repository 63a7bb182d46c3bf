"""Trees of tasks on real workers: the outputs of the examples, and trees whose workers are killed."""

import signal
from itertools import count
from pathlib import Path

from support import until
from tasks.examples import POLL, STATED, InContext, Parents, Polled, Polling, Tree, after
from workers import worker

from gendurable import Client
from gendurable.db.connection import Connection

EXAMPLES = {"fsms": "tasks.examples"}
# Thirty trees of nine, thirty sequences of two parents with two children each.
TASKS = 30 * 9 + 30 * 7


def ended(conn: Connection) -> int:
    [(done,)] = conn.execute("select count(*) from gen_durable where status = 'done'").fetchall()
    return int(done)


def test_a_worker_gives_the_outputs_that_are_stated(dsn: str, client: Client, tmp_path: Path):
    with worker(dsn, "--queues", "default=8", **EXAMPLES) as running:
        running.started()
        ids = {client.insert(machine.new(given)): stated for machine, given, stated in STATED.values()}
        context = client.insert(InContext.new())
        path = tmp_path / "value"
        after(2, path, 10)
        polling = client.insert(Polling.new(Polled(0, str(path)), schedule_in=POLL))
        assert {id: client.wait(id, timeout=60).result for id in ids} == ids
        assert client.wait(context, timeout=60).result == {
            "taskId": "context",
            "executionId": context,
            "attempt": 0,
            "prevError": None,
        }
        polled = client.wait(polling, timeout=60).result
        assert polled["value"] == 10
        assert 2 <= polled["count"] <= 21, "a look each 100 ms of two seconds"


def test_trees_whose_workers_are_killed_again_and_again_come_to_the_same_end(
    dsn: str, client: Client, conn: Connection
):
    ids = client.insert_many([machine.new({"name": "world"}) for machine in (Tree, Parents) for _ in range(30)])
    names = (f"worker-{number}" for number in count())
    for enough in (50, 150, 300):
        with worker(dsn, settings={"name": next(names), "lease": "2s"}, **EXAMPLES) as victim:
            until(lambda enough=enough: ended(conn) >= enough, f"{enough} tasks done")
            victim.signal(signal.SIGKILL)
            victim.wait()
    assert ended(conn) < TASKS, "the kills came too late to mean anything"
    with worker(dsn, settings={"name": next(names), "lease": "2s"}, **EXAMPLES):
        results = [client.wait(id, timeout=60).result for id in ids]
    assert results.count(STATED["tree"][2]) == results.count(STATED["parents in sequence"][2]) == 30
    counts = conn.execute("select status::text, count(*) from gen_durable group by 1").fetchall()
    assert counts == [("done", TASKS)], "nobody was born twice, and nobody was left behind"
