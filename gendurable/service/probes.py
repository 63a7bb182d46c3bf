"""Probes over HTTP: `/livez`, `/readyz` and `/metrics`, answered from memory."""

import socket
import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from socketserver import TCPServer
from time import monotonic
from typing import Any, TypeAlias

from gendurable.errors import AddressUnavailable, describe
from gendurable.observability.metrics import CONTENT_TYPE

Page: TypeAlias = Callable[[], tuple[HTTPStatus, str, bytes]]

TEXT = "text/plain; charset=utf-8"

# An honest request takes milliseconds, and a second where many steps compete for the processor.
SECONDS_PER_REQUEST = 10.0
MOST_CONNECTIONS = 32


class Probes:
    """An HTTP server in a daemon thread.

    `alive` returns what is stuck and `ready` why no work should be expected of this process: nothing means yes. They
    must answer at once and from memory, or an outage of the database would have the whole fleet restarted.
    """

    def __init__(
        self,
        host: str,
        port: int,
        *,
        alive: Callable[[], Sequence[str]],
        ready: Callable[[], Sequence[str]],
        metrics: Callable[[], bytes],
    ) -> None:
        """Bind the address, 0 for any free port; AddressUnavailable if that is impossible."""
        pages: dict[str, Page] = {
            "/livez": lambda: _verdict(alive()),
            "/readyz": lambda: _verdict(ready()),
            "/metrics": lambda: (HTTPStatus.OK, CONTENT_TYPE, metrics()),
        }
        try:
            family, *_, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
            self._server = _Server(family, address, pages)
        except OSError as error:
            raise AddressUnavailable(
                f"probes cannot be served on {_shown(host, port)}: {error.strerror or error}; "
                "stop what listens there, or give another address with --http"
            ) from error
        self._thread = threading.Thread(target=self._server.serve_forever, args=[0.2], name="probes", daemon=True)

    @property
    def address(self) -> str:
        """Where to connect, as HOST:PORT."""
        host, port = self._server.server_address[:2]
        return _shown(str(host), port)

    def start(self) -> None:
        """Begin to answer."""
        self._thread.start()

    def stop(self) -> None:
        """Answer no more and give the address back."""
        if self._thread.is_alive():
            self._server.shutdown()
            self._thread.join()
        self._server.server_close()


class _Server(ThreadingHTTPServer):
    """Serves each connection, and so each request, in a thread of its own, but never many at once nor one for long."""

    request_queue_size = 64

    def __init__(self, family: int, address: Any, pages: Mapping[str, Page]) -> None:
        self.address_family = family
        self._lock = threading.Lock()
        self._open: dict[socket.socket, float] = {}
        super().__init__(address, partial(_Handler, pages))

    def server_bind(self) -> None:
        TCPServer.server_bind(self)  # not HTTPServer's, which asks the DNS for our own name and may wait for it

    def process_request(self, request: Any, client_address: Any) -> None:
        with self._lock:
            # The oldest goes: whoever keeps connections open without asking must not keep the next probe out.
            crowd = list(self._open)[: max(len(self._open) + 1 - MOST_CONNECTIONS, 0)]
            self._open[request] = monotonic()
        _hang_up(crowd)
        super().process_request(request, client_address)

    def shutdown_request(self, request: Any) -> None:
        with self._lock:
            self._open.pop(request, None)
        super().shutdown_request(request)

    def service_actions(self) -> None:
        """Hang up on whoever takes too long; called by the server a few times a second."""
        with self._lock:
            overdue = [request for request, since in self._open.items() if monotonic() - since > SECONDS_PER_REQUEST]
        _hang_up(overdue)

    def server_close(self) -> None:
        super().server_close()
        with self._lock:
            rest = list(self._open)
        _hang_up(rest)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Say nothing: the client went away, or was sent away."""


class _Handler(BaseHTTPRequestHandler):
    server_version = "gendurable"
    sys_version = ""

    def __init__(self, pages: Mapping[str, Page], *args: Any) -> None:
        self._pages = pages
        super().__init__(*args)  # handles the request right here

    def do_GET(self) -> None:
        status, content_type, body = self._page()
        self.send_response(status)
        self.send_header("Content-Type", content_type)
        self.send_header("Content-Length", str(len(body)))
        self.send_header("Cache-Control", "no-store")
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    do_HEAD = do_GET  # noqa: N815  the name that the base class looks for

    def log_message(self, format: str, *args: Any) -> None:  # noqa: A002  the base class's name
        """Say nothing: probes come every few seconds."""

    def _page(self) -> tuple[HTTPStatus, str, bytes]:
        page = self._pages.get(self.path.partition("?")[0])
        if page is None:
            return HTTPStatus.NOT_FOUND, TEXT, f"there is {', '.join(self._pages)}\n".encode()
        try:
            return page()
        except Exception as error:  # noqa: BLE001  the prober must get an answer, and a bad one
            return HTTPStatus.INTERNAL_SERVER_ERROR, TEXT, f"{describe(error)}\n".encode(errors="replace")


def _verdict(reasons: Sequence[str]) -> tuple[HTTPStatus, str, bytes]:
    if not reasons:
        return HTTPStatus.OK, TEXT, b"ok\n"
    return HTTPStatus.SERVICE_UNAVAILABLE, TEXT, "".join(f"{reason}\n" for reason in reasons).encode(errors="replace")


def _hang_up(connections: Sequence[socket.socket]) -> None:
    for connection in connections:
        with suppress(OSError):  # closed a moment ago by the thread that served it
            connection.shutdown(socket.SHUT_RDWR)


def _shown(host: str, port: int) -> str:
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
