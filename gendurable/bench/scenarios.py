"""The scenarios: each fills the tables, lets real workers at them, and returns what it measured."""

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from datetime import timedelta
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any

import psycopg
from attrs import evolve, frozen
from psycopg import sql
from psycopg.rows import dict_row, scalar_row

from gendurable.bench.figures import Figure, percentile
from gendurable.bench.fleet import BenchFailed, Fleet, fleet, server_cpu_seconds
from gendurable.bench.machines import Chain, Clocked, FanOut, InlineChain, Noop, Parked, Width
from gendurable.client import Client
from gendurable.core.instance import NewInstance
from gendurable.db.connection import Connection, Database
from gendurable.db.operations import claim_batch
from gendurable.db.statements import statement

LIMIT_BATCH = 500
QUEUE = "default"
# Workers that notice within a moment that their queue is no longer paused.
AWAKE = ("--poll", "10ms", "--max-poll", "10ms")
PATIENCE = 600.0
STEPS_OF_CHAIN = 5
MILLI = 1000.0
WARM_UP = 5


@frozen(kw_only=True)
class Bench:
    """One run: where, how large, and the limit that was measured in it."""

    dsn: str
    schema: str
    conn: Connection
    client: Client
    scale: float = 1.0
    flags: tuple[str, ...] = ()
    postmaster: int | None = None

    def size(self, full: int) -> int:
        """Return how many for this run."""
        return max(int(full * self.scale), 10)

    def limit(self) -> float:
        """Rows per second of the bare loop, measured now: a shared machine is another one a minute later."""
        return measure_limit(self).rate

    def run(self, name: str, **parameters: Any) -> psycopg.Cursor[Any]:
        """Run one of our own statements."""
        return self.conn.cursor(row_factory=scalar_row).execute(statement(name, room="bench"), parameters)

    def empty(self) -> None:
        """Begin anew."""
        self.conn.execute("truncate gen_durable, signals, workers, paused_queues")

    def settle(self) -> None:
        """Let the server catch up with what was inserted, so that it is not measured."""
        self.conn.execute("vacuum analyze gen_durable")
        try:
            self.conn.execute("checkpoint")
        except psycopg.errors.InsufficientPrivilege:
            return

    def fill(self, instances: Sequence[NewInstance]) -> list[int]:
        """Insert instances into empty tables."""
        self.empty()
        ids = self.client.insert_many(instances)
        self.settle()
        return ids


# What every scenario needs.


def measure_limit(bench: Bench, batch: int = LIMIT_BATCH) -> Figure:
    """Claim and complete rows from one connection, without an engine: what the schema and the server allow."""
    amount = bench.size(20_000 if batch >= LIMIT_BATCH else 4_000)
    bench.fill([Noop.new({}) for _ in range(amount)])
    claim, complete = statement("limit_claim", room="bench"), statement("limit_complete", room="bench")
    done = 0
    # An ordinary connection: how the engine has its statements planned is the engine's.
    with closing(Database(bench.dsn, bench.schema).connect("gendurable bench limit")) as conn:
        cursor = conn.cursor(row_factory=scalar_row)
        started = time.perf_counter()
        while ids := cursor.execute(claim, {"queue": QUEUE, "limit": batch}).fetchall():
            cursor.execute(complete, {"ids": ids})
            done += len(ids)
        seconds = time.perf_counter() - started
    return Figure(
        scenario=f"limit: bare loop, batches of {batch}", amount=done, seconds=seconds, unit="rows", note="no engine"
    )


def beside_limit(bench: Bench, measure: Callable[[], Figure]) -> Figure:
    """Measure something between two measurements of the limit, and its ratio to their mean."""
    before = bench.limit()
    figure = measure()
    return evolve(figure, ratio=figure.rate / ((before + bench.limit()) / 2))


@contextmanager
def metered(bench: Bench, workers: Fleet, amount: int, result: dict[str, Any]) -> Iterator[None]:
    """Put processor time (ms), transactions that write and log bytes per step into `result`."""
    before = _counters(bench)
    cpu, server = workers.cpu_seconds(), server_cpu_seconds(bench.postmaster)
    yield
    result["worker_cpu"] = (workers.cpu_seconds() - cpu) / amount * MILLI
    after = server_cpu_seconds(bench.postmaster)
    if server is not None and after is not None:
        result["server_cpu"] = (after - server) / amount * MILLI
    now = _counters(bench)
    result["wal_bytes"] = (now["wal_bytes"] - before["wal_bytes"]) / amount
    result["transactions"] = (now["writes"] - before["writes"]) / amount


def _counters(bench: Bench) -> Mapping[str, int]:
    found = bench.conn.cursor(row_factory=dict_row).execute(statement("server_counters", room="bench")).fetchone()
    return found or {}


def wait_until_drained(bench: Bench, workers: Fleet) -> None:
    """Wait until nothing is left to do."""
    deadline = time.monotonic() + PATIENCE
    while not bench.run("is_drained").fetchone():
        workers.check()
        if time.monotonic() > deadline:
            raise BenchFailed(f"the work did not end within {PATIENCE:g} s")
        time.sleep(0.01)


def drain(
    bench: Bench,
    scenario: str,
    work: Sequence[NewInstance],
    *,
    each: int = 1,
    beside: bool = False,
    flags: Sequence[str] = (),
    processes: int = 1,
    unit: str = "steps",
    note: str = "",
) -> Figure:
    """Fill the tables, start workers and measure until all is done; an instance takes `each` steps.

    `beside`: what the tables hold already stays there.
    """
    if not beside:
        bench.empty()
    bench.client.insert_many(work)
    bench.settle()
    steps = len(work) * each
    measured: dict[str, Any] = {}
    # The queue is paused until every worker is ready: what it takes to start one is not measured.
    bench.client.pause(QUEUE)
    with fleet(bench.dsn, bench.schema, count=processes, flags=[*bench.flags, *AWAKE, *flags]) as workers:
        workers.wait_until_started()
        with metered(bench, workers, steps, measured):
            bench.client.resume(QUEUE)
            started = time.perf_counter()
            wait_until_drained(bench, workers)
            seconds = time.perf_counter() - started
    return Figure(scenario=scenario, amount=steps, seconds=seconds, unit=unit, note=note, **measured)


# The scenarios.


def limits(bench: Bench) -> list[Figure]:
    """The bare loop, with large and with small batches."""
    return [measure_limit(bench), measure_limit(bench, 10)]


def noops(bench: Bench) -> list[Figure]:
    """Jobs that do nothing: one process, two processes, and without claiming ahead."""
    amount = bench.size(40_000)
    figures = []
    for name, flags, processes in (
        ("no-op jobs, prefetch auto", ["--prefetch", "auto"], 1),
        ("no-op jobs, prefetch auto, 2 processes", ["--prefetch", "auto"], 2),
        ("no-op jobs, prefetch 0", ["--prefetch", "0"], 1),
    ):
        jobs = [Noop.new({}) for _ in range(amount)]
        figures.append(
            beside_limit(bench, partial(drain, bench, name, jobs, flags=flags, processes=processes, unit="jobs"))
        )
    return figures


def chains(bench: Bench) -> list[Figure]:
    """Five steps in a row, each committed before the next."""
    amount = bench.size(8_000)
    figures = []
    for name, machine in (("chains of 5 steps", Chain), ("chains of 5 inline steps", InlineChain)):
        work = [machine.new({}) for _ in range(amount)]
        chain = partial(drain, bench, name, work, each=STEPS_OF_CHAIN, flags=["--prefetch", "auto"])
        figures.append(beside_limit(bench, chain))
    return figures


def inserts(bench: Bench) -> list[Figure]:
    """Enqueue in bulk and one by one, the latter beside an insert without us."""
    amount = bench.size(20_000)
    bench.empty()
    batch = [Noop.new({}) for _ in range(amount)]

    def in_bulk() -> Figure:
        bench.empty()
        started = time.perf_counter()
        bench.client.insert_many(batch)
        return Figure(scenario="insert in bulk", amount=amount, seconds=time.perf_counter() - started, unit="rows")

    bulk = beside_limit(bench, in_bulk)
    singles = bench.size(1_000)
    ours, bare = [], []
    for _ in range(singles):  # in turns, so that both see the same moments of the machine
        began = time.perf_counter()
        bench.client.insert(batch[0])
        between = time.perf_counter()
        bench.run("bare_insert", fsm="bench.noop")
        bare.append(time.perf_counter() - between)
        ours.append(between - began)
    return [
        bulk,
        Figure(
            scenario="insert one by one",
            amount=singles,
            seconds=sum(ours),
            unit="rows",
            ratio=percentile(bare, 0.5) / percentile(ours, 0.5),
            note="ratio: to a bare one-row insert",
            **_percentiles(ours),
        ),
    ]


def fan_out(bench: Bench) -> list[Figure]:
    """One instance spawns a thousand children and joins them."""
    return [beside_limit(bench, partial(_fan_out, bench, bench.size(1_000)))]


def _fan_out(bench: Bench, children: int) -> Figure:
    bench.empty()
    measured: dict[str, Any] = {}
    with fleet(bench.dsn, bench.schema, flags=[*bench.flags, "--prefetch", "auto"]) as workers:
        # A worker that has run before: the first steps of a process are not what is measured.
        bench.client.wait(bench.client.insert(FanOut.new(Width(children))), timeout=PATIENCE)
        with metered(bench, workers, children, measured):
            parent = bench.client.insert(FanOut.new(Width(children)))
            bench.client.wait(parent, timeout=PATIENCE)
    # From the commit that spawned them to the commit of the last one, which joined them.
    span = "select extract(epoch from max(updated_at) - min(inserted_at))::float8 from gen_durable where parent_id = %s"
    seconds = float(bench.conn.execute(span, [parent]).fetchone()[0])  # type: ignore[index]
    return Figure(
        scenario=f"fan-out of {children} and join", amount=children, seconds=seconds, unit="children", **measured
    )


def signals(bench: Bench) -> list[Figure]:
    """A thousand parked instances, signalled one by one by another process."""
    amount = bench.size(1_000)
    bench.empty()
    with fleet(bench.dsn, bench.schema, flags=bench.flags) as workers:
        ids = bench.client.insert_many([Parked.new({}) for _ in range(amount)])
        workers.wait_until_started()
        wait_until_drained(bench, workers)
        measured: dict[str, Any] = {}
        with metered(bench, workers, amount, measured):
            started = time.perf_counter()
            for parked in ids:
                bench.client.signal(parked, "go")
            sent = time.perf_counter() - started
            wait_until_drained(bench, workers)
            seconds = time.perf_counter() - started
    return [
        Figure(
            scenario=f"{amount} parked, signalled one by one",
            amount=amount,
            seconds=seconds,
            unit="signals",
            ratio=seconds / sent,
            note="ratio: time until all are done to the sender's own",
            **measured,
        )
    ]


def keyed(bench: Bench) -> list[Figure]:
    """Work over a hundred partition keys: each step commits on the connection that holds its lock."""
    amount = bench.size(5_000)
    jobs = [Noop.new({}, partition_key=f"key:{n % 100}") for n in range(amount)]
    flags = ["--prefetch", "auto"]
    return [
        beside_limit(bench, partial(drain, bench, "keyed jobs, 100 partition keys", jobs, unit="jobs", flags=flags))
    ]


def latency(bench: Bench) -> list[Figure]:
    """From the commit of an insert to the start of the step, one insert every 100 ms, default settings."""
    amount = bench.size(100)
    bench.empty()
    committed: dict[int, float] = {}
    with fleet(bench.dsn, bench.schema, flags=bench.flags) as workers:
        workers.wait_until_started()
        for n in range(WARM_UP + amount):
            inserted = bench.client.insert(Clocked.new({}))
            if n >= WARM_UP:
                committed[inserted] = time.time()
            time.sleep(0.1)
        wait_until_drained(bench, workers)
    delays = [bench.client.get(each).result["started"] - at for each, at in committed.items()]
    return [
        Figure(
            scenario="latency, an insert every 100 ms",
            amount=amount,
            seconds=sum(delays),
            unit="",
            note="from the insert's commit to the step's start, polling only",
            **_percentiles(delays),
        )
    ]


def idle(bench: Bench) -> list[Figure]:
    """What a worker costs that has nothing to do."""
    seconds = max(60 * bench.scale, 5)
    bench.empty()
    with fleet(bench.dsn, bench.schema, flags=bench.flags) as workers:
        workers.wait_until_started()
        time.sleep(max(15 * bench.scale, 3))  # until the poller has slowed down
        cpu = workers.cpu_seconds()
        before = _statements(bench)
        time.sleep(seconds)
        used = workers.cpu_seconds() - cpu
        statements = _statements(bench) - before
    return [
        Figure(
            scenario="idle",
            amount=statements,
            seconds=seconds,
            unit="statements",
            note=f"{100 * used / seconds:.2f} % of a core",
        )
    ]


def _statements(bench: Bench) -> int:
    """Transactions that the server has counted; each statement of an idle worker is one."""
    bench.conn.execute("select pg_stat_clear_snapshot()")
    time.sleep(1.1)  # sessions report at most once a second
    return int(_counters(bench)["transactions"])


def history(bench: Bench) -> list[Figure]:
    """The same drain on a table that holds a million finished rows and a hundred thousand future ones."""
    jobs = [Noop.new({}) for _ in range(bench.size(20_000))]
    ended, future = bench.size(1_000_000), bench.size(100_000)
    flags = ["--prefetch", "auto"]
    empty = drain(bench, "drain on an empty table", jobs, unit="jobs", flags=flags)
    bench.empty()
    bench.run("history", ended=ended, future=future)
    name = f"drain beside {ended:,} ended + {future:,} future"
    full = drain(bench, name, jobs, beside=True, unit="jobs", flags=flags)
    again = drain(bench, "drain on an empty table, again", jobs, unit="jobs", flags=flags)
    ratio = full.rate / ((empty.rate + again.rate) / 2)
    return [empty, evolve(full, ratio=ratio, note="ratio: to the drain on an empty table"), again]


def backlogs(bench: Bench) -> list[Figure]:
    """A claim of ten rows behind 15 000 blocked siblings of a busy key, and behind 200 000 urgent rows not yet due."""
    plain = _claim_times(bench, None, 0)
    figures = []
    for scenario, name, count in (
        ("claim behind {:,} siblings of a busy key", "blocked", bench.size(15_000)),
        ("claim behind {:,} urgent future rows", "urgent_future", bench.size(200_000)),
    ):
        times = _claim_times(bench, name, count)
        figures.append(
            Figure(
                scenario=scenario.format(count),
                amount=len(times),
                seconds=sum(times),
                unit="claims",
                ratio=percentile(times, 0.5) / percentile(plain, 0.5),
                note="ratio: to a claim without them",
                **_percentiles(times),
            )
        )
    return figures


def _claim_times(bench: Bench, backlog: str | None, count: int) -> list[float]:
    bench.fill([Noop.new({}) for _ in range(2_000)])
    if backlog is not None:
        bench.run(backlog, count=count)
        bench.settle()
    times = []
    for _ in range(50):
        began = time.perf_counter()
        claim_batch(
            bench.conn,
            queue=QUEUE,
            machines=["bench.noop@1"],
            worker="bench",
            limit=10,
            lease=timedelta(minutes=1),
        )
        times.append(time.perf_counter() - began)
    return times


def memory(bench: Bench) -> list[Figure]:
    """How much a worker has grown after 200 000 jobs."""
    amount = bench.size(200_000)
    warm = bench.size(5_000)
    bench.fill([Noop.new({}) for _ in range(warm)])
    with fleet(bench.dsn, bench.schema, flags=[*bench.flags, "--prefetch", "auto"]) as workers:
        workers.wait_until_started()
        wait_until_drained(bench, workers)
        before = workers.memory_bytes()
        started = time.perf_counter()
        bench.client.insert_many([Noop.new({}) for _ in range(amount)])
        wait_until_drained(bench, workers)
        seconds = time.perf_counter() - started
        grown = workers.memory_bytes() - before
    return [
        Figure(
            scenario=f"memory after {amount:,} jobs",
            amount=amount,
            seconds=seconds,
            unit="jobs",
            note=f"grown by {grown / 1e6:.1f} MB",
        )
    ]


def _percentiles(values: Sequence[float]) -> dict[str, Any]:
    return {f"p{share}": percentile(values, share / 100) for share in (50, 95, 99)}


SCENARIOS: Mapping[str, Callable[[Bench], list[Figure]]] = MappingProxyType(
    {
        "limit": limits,
        "noops": noops,
        "chains": chains,
        "inserts": inserts,
        "fan-out": fan_out,
        "signals": signals,
        "keyed": keyed,
        "latency": latency,
        "idle": idle,
        "history": history,
        "backlogs": backlogs,
        "memory": memory,
    }
)


def find_postmaster(conn: Connection) -> int | None:
    """Return the pid of a server that runs on this machine and lets us know; else None."""
    try:
        row = conn.execute("select split_part(pg_read_file('postmaster.pid'), E'\\n', 1)").fetchone()
        pid = int(row[0]) if row else 0
        return pid if "postgres" in Path(f"/proc/{pid}/cmdline").read_text() else None
    except (psycopg.Error, OSError, ValueError):
        return None


def drop_schema(conn: Connection, schema: str) -> None:
    """Remove the throw-away schema."""
    conn.execute(sql.SQL("drop schema if exists {} cascade").format(sql.Identifier(schema)))
