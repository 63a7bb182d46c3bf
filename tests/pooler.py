"""A transaction pooler: few server sessions, and each transaction of a client may get another of them.

It does what PgBouncer does in transaction mode, on purpose in the two ways that matter: `Choice.LAST` hands out the
session that was used last, so that clients seem to keep theirs while nobody else is about, and `Choice.NEXT` goes round.
Where a real PgBouncer is installed, `pgbouncer` runs that.
"""

import os
import select
import shutil
import socket
import struct
import subprocess
import threading
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from enum import Enum
from pathlib import Path
from typing import Self

import psycopg
from proxy import CANCEL_REQUEST, ENCRYPTION_REQUESTS, Stream
from psycopg.conninfo import conninfo_to_dict, make_conninfo
from support import until

REPORTED = ("server_version", "client_encoding", "DateStyle", "TimeZone", "standard_conforming_strings")
IDLE = ord("I")


class Choice(Enum):
    """Which of the idle sessions serves the next transaction."""

    LAST = "last"
    NEXT = "next"


class Pooler:
    """Serves any number of clients with `size` sessions of the server."""

    def __init__(self, dsn: str, choice: Choice, size: int = 8) -> None:
        self._server = dsn
        self._choice = choice
        self._sessions = [psycopg.connect(dsn, autocommit=True) for _ in range(size)]
        self._idle = deque(self._sessions)
        self._freed = threading.Condition()
        self._clients: list[socket.socket] = []
        self._door = socket.create_server(("127.0.0.1", 0))
        self.dsn = make_conninfo(
            dsn, host="127.0.0.1", port=self._door.getsockname()[1], sslmode="disable", gssencmode="disable"
        )
        threading.Thread(target=self._let_in, daemon=True).start()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._door.shutdown(socket.SHUT_RDWR)
        self._door.close()
        for client in self._clients:
            with suppress(OSError):
                client.shutdown(socket.SHUT_RDWR)
        for session in self._sessions:
            session.close()

    def _let_in(self) -> None:
        with suppress(OSError):
            while True:
                client, _ = self._door.accept()
                self._clients.append(client)
                threading.Thread(target=self._serve, args=[client], daemon=True).start()

    def _serve(self, client: socket.socket) -> None:
        with suppress(OSError, ValueError), client:
            stream = Stream(client)
            if self._greet(client, stream):
                while True:
                    self._transaction(client, stream)

    def _greet(self, client: socket.socket, stream: Stream) -> bool:
        while True:
            (code,) = struct.unpack_from("!i", stream.untyped(), 4)
            if code == CANCEL_REQUEST:
                return False
            if code not in ENCRYPTION_REQUESTS:
                break
            client.sendall(b"N")
        values = [(name, self._sessions[0].info.parameter_status(name) or "") for name in REPORTED]
        reported = [_message(b"S", f"{name}\0{value}\0".encode()) for name, value in values]
        client.sendall(
            _message(b"R", struct.pack("!i", 0))
            + b"".join(reported)
            + _message(b"K", struct.pack("!ii", 1, 1))
            + _message(b"Z", b"I")
        )
        return True

    def _transaction(self, client: socket.socket, stream: Stream) -> None:
        """Wait for a client to begin, and lend it a session until it is done."""
        first = stream.messages()
        if any(kind == ord("X") for kind, _ in first):
            raise ConnectionResetError("the client has left")
        with self._lent() as session, socket.socket(fileno=os.dup(session.fileno())) as server:
            server.setblocking(True)
            answers = Stream(server)
            asked = _send(server, first)
            while True:
                ready, _, _ = select.select([client, server], [], [])
                if client in ready:
                    asked += _send(server, stream.messages())
                if server in ready:
                    messages = answers.messages()
                    client.sendall(b"".join(message for _, message in messages))
                    ends = [message[5] for kind, message in messages if kind == ord("Z")]
                    asked -= len(ends)
                    if ends and not asked and ends[-1] == IDLE:
                        return

    @contextmanager
    def _lent(self) -> Iterator["psycopg.Connection[tuple[object, ...]]"]:
        with self._freed:
            self._freed.wait_for(lambda: self._idle)
            session = self._idle.pop() if self._choice is Choice.LAST else self._idle.popleft()
        try:
            yield session
        except BaseException:
            # The client left in the middle of a transaction: nobody else may be given its answers, or its locks.
            session.close()
            session = psycopg.connect(self._server, autocommit=True)
            self._sessions.append(session)
            raise
        finally:
            with self._freed:
                self._idle.append(session)
                self._freed.notify()


def _send(server: socket.socket, messages: list[tuple[int, bytes]]) -> int:
    """Forward what a client says; return how many answers it waits for."""
    server.sendall(b"".join(message for _, message in messages))
    return sum(kind in b"QSF" for kind, _ in messages)


def _message(kind: bytes, content: bytes) -> bytes:
    return kind + struct.pack("!i", len(content) + 4) + content


PGBOUNCER = shutil.which("pgbouncer") or shutil.which("pgbouncer", path="/usr/sbin:/usr/local/sbin")


@contextmanager
def pgbouncer(dsn: str, folder: Path) -> Iterator[str]:
    """Run the real one in transaction mode and yield its address."""
    assert PGBOUNCER is not None
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    parts = conninfo_to_dict(dsn)
    (folder / "pgbouncer.ini").write_text(
        f"""[databases]
            * = host={parts["host"]} port={parts.get("port", 5432)} user={parts["user"]}
            [pgbouncer]
            listen_addr = 127.0.0.1
            listen_port = {port}
            unix_socket_dir =
            auth_type = any
            pool_mode = transaction
            default_pool_size = 8
            ignore_startup_parameters = extra_float_digits
            """.replace("            ", "")
    )
    # It refuses to be root, and only the server's own account may enter the folder of its socket.
    account = ["-u", Path(parts["host"]).owner()] if os.geteuid() == 0 else []
    with (folder / "pgbouncer.log").open("w") as log:
        command = [PGBOUNCER, *account, str(folder / "pgbouncer.ini")]
        running = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=log)
    address = make_conninfo(dsn, host="127.0.0.1", port=port, sslmode="disable", gssencmode="disable")

    def answers() -> bool:
        assert running.poll() is None, (folder / "pgbouncer.log").read_text()
        try:
            psycopg.connect(address, connect_timeout=5).close()
        except psycopg.OperationalError:
            return False
        return True

    try:
        until(answers, "an answer of pgbouncer")
        yield address
    finally:
        running.terminate()
        running.wait()
