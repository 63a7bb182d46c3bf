"""The story: real worker processes on a private Postgres, told as it happens."""

import json
import secrets
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import IO, Any

import click

from gendurable import Client, Instance, embedded, migrate
from gendurable.cli.output import coloured
from gendurable.demo.machines import Book, Booking, Checkout, Fragile, Order
from gendurable.errors import GenDurableError

PATIENCE = 60.0
WIDTH = 40
# A dead worker's row is free again when its lease is over: short here, so that nobody has to wait for a minute.
SETTINGS = ["--lease", "2s", "--heartbeat", "500ms", "--reap", "500ms", "--poll", "200ms", "--max-poll", "500ms"]


def main() -> int:
    """Tell the story; return the exit code."""
    began = time.monotonic()
    try:
        with embedded.start_temporary() as server:
            say(f"A private Postgres runs, started in {time.monotonic() - began:.1f} s. It goes away with this demo.")
            migrate.up(server.dsn)
            with Client(server.dsn) as client:
                checkout(server.dsn, client)
                crash(server.dsn, client)
                turns(server.dsn, client)
    except GenDurableError as error:
        sys.stderr.write(f"demo: {error}\n")
        return 1
    say()
    say(f"That was it, in {time.monotonic() - began:.0f} s. Next: `make dev` keeps such a server and a worker running")
    say("for you to play with, and the README has a first machine of your own.")
    return 0


def checkout(dsn: str, client: Client) -> None:
    """Await, signal, fan out, join."""
    title("1. A checkout waits for its payment, ships three parcels at once, and ends")
    order = client.insert(Checkout.new(Order(42), unique_key="order:42"))
    say(f"  inserted: instance {order} is a row, and its next step is a column of it")
    with worker(dsn, "checkout=5"):
        parked = wait_for(client, order, "awaiting_signal")
        awaits = ", ".join(parked.awaits or ())
        say(f"  the row says:   status={parked.status} step={parked.step} awaits={awaits}")
        say(f"  somebody pays:  gendurable signal {order} payment_confirmed '{{\"amount\": 100}}'")
        client.signal(order, "payment_confirmed", {"amount": 100}, dedup_key="evt-7")
        ended = client.wait(order, timeout=PATIENCE)
    say(f"  {ended.status}: {json.dumps(ended.result)}")


def crash(dsn: str, client: Client) -> None:
    """A worker dies inside a step; another one takes over."""
    title("2. A worker is killed in the middle of a step, and nothing is lost")
    fragile = client.insert(Fragile.new({}))
    with worker(dsn, "default=5") as process:
        process.wait(PATIENCE)
        row = client.get(fragile)
        say(f"  the worker is gone (exit {process.returncode}); the row still says {row.status}, leased to it")
    say("  another worker starts, and takes the row over when the lease has run out ...")
    with worker(dsn, "default=5"):
        ended = client.wait(fragile, timeout=PATIENCE)
    say(f"  {ended.status} at the second execution: {json.dumps(ended.result)}")


def turns(dsn: str, client: Client) -> None:
    """Partition keys: one at a time within a key, in order; side by side otherwise."""
    title("3. Bookings of one account take turns; different accounts run side by side")
    bookings = [Booking(account, number) for number in (1, 2, 3) for account in ("anna", "ben", "cleo")]
    ids = client.insert_many(Book.new(each, partition_key=f"account:{each.account}") for each in bookings)
    with worker(dsn, "accounts=9"):
        results: list[dict[str, Any]] = [client.wait(each, timeout=PATIENCE).result for each in ids]
    first = min(result["began"] for result in results)
    span = max(result["ended"] for result in results) - first
    for result in sorted(results, key=lambda result: (result["account"], result["number"])):
        start = int((result["began"] - first) / span * WIDTH)
        length = max(int((result["ended"] - result["began"]) / span * WIDTH), 1)
        say(f"  {result['account']:5} {result['number']}  {' ' * start}{'#' * length}")


@contextmanager
def worker(dsn: str, queues: str) -> Iterator["subprocess.Popen[str]"]:
    """Run a worker process whose steps are told as they are committed."""
    command = [sys.executable, "-m", "gendurable", "worker", "--fsms", "gendurable.demo.machines", "--queues", queues]
    # A name of its own: a worker that comes back under its old one takes back at once what it held, and tells no story.
    name = f"demo-{secrets.token_hex(4)}"
    say(f"  $ gendurable worker --fsms gendurable.demo.machines --queues {queues}")
    process = subprocess.Popen(  # noqa: S603  our own command
        [*command, "--name", name, "--dsn", dsn, "--log-format", "json", *SETTINGS],
        stdin=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
    )
    teller = threading.Thread(target=tell, args=[process.stderr], daemon=True)
    teller.start()
    try:
        yield process
    finally:
        process.terminate()
        process.wait(PATIENCE)
        teller.join(PATIENCE)


def tell(log: IO[str]) -> None:
    """Turn a worker's log into lines for people."""
    for line in log:
        try:
            event = json.loads(line)
        except ValueError:
            say(f"    {line.rstrip()}")
            continue
        if event["event"] == "step_committed":
            say(f"    instance {event['id']:<3} {event['fsm']:14} {event['step']:8} -> {event['outcome']}")
        elif event["event"] == "lease_reaped":
            say(f"    instance {event['id']:<3} {event['fsm']:14} {event['step']:8} the lease is over: it runs again")


def wait_for(client: Client, instance: int, status: str) -> Instance:
    """Wait until an instance stands where it should."""
    deadline = time.monotonic() + PATIENCE
    while (found := client.get(instance)).status != status and time.monotonic() < deadline:
        time.sleep(0.02)
    return found


def title(text: str) -> None:
    """Begin a chapter."""
    say()
    say(click.style(text, bold=True) if coloured() else text)


def say(text: str = "") -> None:
    """Print a line at once, whole even where threads tell together."""
    sys.stdout.write(f"{text}\n")
    sys.stdout.flush()
