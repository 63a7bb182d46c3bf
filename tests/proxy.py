"""A door in front of the test server that can be told to misbehave as networks do: real sockets, real sessions.

    with Proxy(dsn) as proxy:
        conn = psycopg.connect(proxy.dsn)
        fault = proxy.lose_answer("commit")     # carried out, but the client never hears of it
        …
        fault.wait()

It follows the protocol closely enough to know which statement a client runs, prepared ones and pipelines included, so
that a fault strikes at an exact point and no test depends on timing. A statement is named by its text ("commit") or, if
it is one of our files, by the file's name ("claim"), which stands in its first line.
"""

import re
import socket
import struct
import threading
from collections.abc import Callable
from contextlib import suppress
from typing import Self

import psycopg
from psycopg.conninfo import make_conninfo
from support import DEADLINE

CANCEL_REQUEST, *ENCRYPTION_REQUESTS = 80877102, 80877103, 80877104
CHUNK = 1 << 16

Where = Callable[["Link"], bool]


def anywhere(link: "Link") -> bool:
    return True


class Proxy:
    """Forwards TCP connections on the loopback to the server of a DSN."""

    def __init__(self, dsn: str) -> None:
        self._server = _server_address(dsn)
        # Bound but never listening: it keeps the port ours while connections are refused.
        self._place = _bound(0)
        self.port: int = self._place.getsockname()[1]
        # Encryption would be asked for before the start-up packet, and hide everything after it.
        self.dsn = make_conninfo(
            dsn, host="127.0.0.1", hostaddr="127.0.0.1", port=self.port, sslmode="disable", gssencmode="disable"
        )
        self.accepted = 0
        self.delay = 0.0
        self._lock = threading.Lock()
        self._links: list[Link] = []
        self._faults: list[Fault] = []
        self._listener: socket.socket | None = None
        self._door: threading.Thread | None = None
        self.accept()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def links(self) -> list["Link"]:
        """The connections that are open now, oldest first."""
        with self._lock:
            return [link for link in self._links if link.is_open]

    # What can go wrong, at once.

    def cut(self, where: Where = anywhere) -> int:
        """Close connections on both sides; return how many."""
        chosen = [link for link in self.links if where(link)]
        for link in chosen:
            link.cut()
        return len(chosen)

    def refuse(self) -> None:
        """Refuse new connections, as a server that is down; open ones live on."""
        if self._listener is not None and self._door is not None:
            self._listener.shutdown(socket.SHUT_RDWR)  # wakes the thread that accepts
            self._door.join()
            self._listener.close()
            self._listener = self._door = None

    def accept(self) -> None:
        """Let new connections in again."""
        if self._listener is None:
            self._listener = _bound(self.port)
            self._listener.listen(128)
            self._door = threading.Thread(target=self._let_in, args=[self._listener], daemon=True)
            self._door.start()

    # What can go wrong at a statement; each strikes once.

    def cut_at(self, statement: str, where: Where = anywhere) -> "Fault":
        """Cut the connection that sends this statement, before the server sees it."""
        return self._arm(Fault(statement, where, Link.cut))

    def swallow_at(self, statement: str, where: Where = anywhere) -> "Fault":
        """Fall silent for ever on the connection that sends this statement, before the server sees it."""
        return self._arm(Fault(statement, where, Link.swallow))

    def lose_answer(self, statement: str, where: Where = anywhere) -> "Fault":
        """Let the server carry the statement out, and cut the connection in place of its answer.

        By the time the client finds itself cut off, what the statement commits is committed.
        """
        return self._arm(Fault(statement, where, Link.lose_answer))

    def close(self) -> None:
        """Cut everything and leave no thread behind."""
        self.refuse()
        self._place.close()
        with self._lock:
            links = list(self._links)
        for link in links:
            link.close()

    # Inside.

    def _arm(self, fault: "Fault") -> "Fault":
        with self._lock:
            self._faults.append(fault)
        return fault

    def take_fault(self, link: "Link", sql: str) -> "Fault | None":
        """Return the first fault that is meant for this statement, and disarm it."""
        with self._lock:
            fault = next((fault for fault in self._faults if fault.fits(link, sql)), None)
            if fault is not None:
                self._faults.remove(fault)
            return fault

    def _let_in(self, listener: socket.socket) -> None:
        with suppress(OSError):  # refused from now on
            while True:
                client, _ = listener.accept()
                try:
                    server = _connected(self._server)
                except OSError:  # the server is down: so are we
                    client.close()
                    continue
                with self._lock:
                    self.accepted += 1
                    self._links = [link for link in self._links if not link.close_if_done()]
                    self._links.append(Link(self, _prompt(client), server))


class Fault:
    """Something that will go wrong once."""

    def __init__(self, statement: str, where: Where, strike: Callable[["Link"], None]) -> None:
        self._named = re.compile(rf"\s*(?:--\s*{re.escape(statement)}:|{re.escape(statement)}(?!\w))", re.IGNORECASE)
        self._where = where
        self._strike = strike
        self._struck = threading.Event()
        self.link: Link | None = None

    @property
    def has_struck(self) -> bool:
        return self._struck.is_set()

    def wait(self, deadline: float = DEADLINE) -> "Link":
        """Wait until it has gone wrong and return where."""
        assert self._struck.wait(deadline), f"nothing sent {self._named.pattern!r} within {deadline} s"
        assert self.link is not None
        return self.link

    def fits(self, link: "Link", sql: str) -> bool:
        return self._named.match(sql) is not None and self._where(link)

    def strike(self, link: "Link") -> None:
        self.link = link
        self._strike(link)
        self._struck.set()


class Link:
    """One connection: a client's socket, the server's, and a thread for each direction."""

    def __init__(self, proxy: Proxy, client: socket.socket, server: socket.socket) -> None:
        self._proxy = proxy
        self._client = client
        self._server = server
        self._cut = threading.Event()
        self._swallowed = False
        self._startup: dict[str, str] = {}
        self._prepared: dict[str, str] = {}
        # What the client asked for and what the server answered in full, the start-up included.
        self._asked = 1
        self._answered = 0
        self._lost: int | None = None
        self._threads = [
            threading.Thread(target=self._pump, args=[pump], daemon=True) for pump in (self._up, self._down)
        ]
        for thread in self._threads:
            thread.start()

    @property
    def application(self) -> str:
        """The name that the client gave itself; empty until it did."""
        return self._startup.get("application_name", "")

    @property
    def is_open(self) -> bool:
        return not self._cut.is_set()

    def cut(self) -> None:
        """Close both sides."""
        self._cut.set()
        for side in (self._client, self._server):
            with suppress(OSError):
                side.shutdown(socket.SHUT_RDWR)

    def swallow(self) -> None:
        """Take in whatever is sent, forward nothing, close nothing: neither side learns that the other is gone."""
        self._swallowed = True

    def lose_answer(self) -> None:
        """Forward no more answers, and cut once the server has answered the statement that is being sent."""
        self._lost = self._asked + 1

    def close(self) -> None:
        self.cut()
        for thread in self._threads:
            thread.join()
        self._client.close()
        self._server.close()

    def close_if_done(self) -> bool:
        if any(thread.is_alive() for thread in self._threads):
            return False
        self.close()
        return True

    def _pump(self, pump: Callable[[], None]) -> None:
        with suppress(OSError):  # one of the sides was closed
            pump()
        if self._swallowed:
            self._cut.wait()
        self.cut()

    def _up(self) -> None:
        """Forward the client's messages, looking at each."""
        stream = Stream(self._client)
        self._forward(self._server, self._start(stream))
        while True:
            out = bytearray()
            for kind, message in stream.messages():
                sql = self._statement(kind, message)
                fault = None if sql is None else self._proxy.take_fault(self, sql)
                if fault is not None:
                    self._forward(self._server, out)
                    out = bytearray()
                    fault.strike(self)
                if kind in b"QSF":
                    self._asked += 1
                out += message
            self._forward(self._server, out)

    def _down(self) -> None:
        """Forward the server's messages, unless the answer is to be lost."""
        stream = Stream(self._server)
        while True:
            out = bytearray()
            for kind, message in stream.messages():
                out += message
                self._answered += kind == ord("Z")
            if self._lost is None:
                self._forward(self._client, out)
            elif self._answered >= self._lost:
                self.cut()

    def _start(self, stream: "Stream") -> bytes:
        """Read the start-up packet, or that of a request to cancel, which names nobody."""
        while True:
            packet = stream.untyped()
            (code,) = struct.unpack_from("!i", packet, 4)
            if code in ENCRYPTION_REQUESTS:
                self._client.sendall(b"N")
                continue
            if code != CANCEL_REQUEST:
                words = packet[8:].decode(errors="replace").split("\0")
                self._startup = dict(zip(words[::2], words[1::2], strict=False))
            return packet

    def _statement(self, kind: int, message: bytes) -> str | None:
        """Return the text of the statement that a message has carried out, if it does."""
        words = message[5:].split(b"\0", 2)
        if kind == ord("Q"):
            return words[0].decode(errors="replace")
        if kind == ord("P"):
            self._prepared[words[0].decode()] = words[1].decode(errors="replace")
        if kind == ord("B"):
            return self._prepared[words[1].decode()]
        return None

    def _forward(self, side: socket.socket, data: bytes | bytearray) -> None:
        if self._proxy.delay:
            self._cut.wait(self._proxy.delay)
        if data and not self._swallowed:
            side.sendall(data)


class Stream:
    """Cuts what a socket receives into messages."""

    def __init__(self, source: socket.socket) -> None:
        self._source = source
        self._buffer = bytearray()

    def untyped(self) -> bytes:
        """Wait for a message of the start: its length and its content."""
        while (message := self._take(0)) is None:
            self._receive()
        return message

    def messages(self) -> list[tuple[int, bytes]]:
        """Wait for messages; return all that are complete, each with its type."""
        complete: list[tuple[int, bytes]] = []
        while not complete:
            self._receive()
            while (message := self._take(1)) is not None:
                complete.append((message[0], message))
        return complete

    def _take(self, length_at: int) -> bytes | None:
        if len(self._buffer) < length_at + 4:
            return None
        size = length_at + struct.unpack_from("!i", self._buffer, length_at)[0]
        if len(self._buffer) < size:
            return None
        message = bytes(self._buffer[:size])
        del self._buffer[:size]
        return message

    def _receive(self) -> None:
        data = self._source.recv(CHUNK)
        if not data:
            raise ConnectionResetError("closed")
        self._buffer += data


def _bound(port: int) -> socket.socket:
    door = socket.socket()
    door.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    door.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
    door.bind(("127.0.0.1", port))
    return door


def _connected(address: tuple[str, int]) -> socket.socket:
    host, port = address
    if not host.startswith("/"):
        return _prompt(socket.create_connection(address))
    server = socket.socket(socket.AF_UNIX)
    try:
        server.connect(f"{host}/.s.PGSQL.{port}")
    except OSError:
        server.close()
        raise
    return server


def _prompt(connection: socket.socket) -> socket.socket:
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return connection


def _server_address(dsn: str) -> tuple[str, int]:
    with psycopg.connect(dsn) as conn:  # the driver knows best what a DSN and the environment leave open
        return conn.info.hostaddr or conn.info.host, conn.info.port
