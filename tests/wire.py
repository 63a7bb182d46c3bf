"""What a connection says to the server, read from the wire itself."""

import tempfile
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager

from attrs import define, field
from psycopg import pq

from gendurable.db.connection import Connection


@define
class Wire:
    """What a connection sent, by kind of message."""

    sent: Counter[str] = field(factory=Counter)

    @property
    def statements(self) -> int:
        return self.sent["Execute"] + self.sent["Query"]

    @property
    def round_trips(self) -> int:
        """A simple query is its own; all others end with a sync, after which the client waits for the answers."""
        return self.sent["Sync"] + self.sent["Query"]


@contextmanager
def wire_of(conn: Connection) -> Iterator[Wire]:
    wire = Wire()
    with tempfile.TemporaryFile("w+") as log:
        conn.pgconn.trace(log.fileno())
        conn.pgconn.set_trace_flags(pq.Trace.SUPPRESS_TIMESTAMPS)
        try:
            yield wire
        finally:
            conn.pgconn.untrace()
        log.seek(0)
        messages = [line.split("\t") for line in log]
    wire.sent.update(message[2].strip() for message in messages if message[0] == "F")
