"""Probes over HTTP: `/livez`, `/readyz` and `/metrics`, answered from memory."""

import socket
import threading
from collections.abc import Callable, Sequence
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from socketserver import TCPServer
from time import monotonic
from typing import Any

from gendurable.errors import AddressUnavailable, describe
from gendurable.observability.metrics import CONTENT_TYPE

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
        self._thread = threading.Thread(target=self._server.serve_forever, name="probes", daemon=True)

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
