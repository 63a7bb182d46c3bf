import http.client
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, suppress
from typing import Any

import pytest
from prometheus_client import CollectorRegistry
from support import until

from gendurable.errors import AddressUnavailable, GenDurableError
from gendurable.observability.metrics import Metrics
from gendurable.service import probes
from gendurable.service.probes import Probes


@pytest.fixture
def serve() -> Iterator[Callable[..., Probes]]:
    """Serve probes on a free port of the loopback."""
    with ExitStack() as stack:

        def start(host: str = "127.0.0.1", port: int = 0, **pages: Any) -> Probes:
            given = {"alive": list, "ready": list, "metrics": lambda: b""} | pages
            running = Probes(host, port, **given)
            stack.callback(running.stop)
            running.start()
            return running

        yield start


def ask(served: Probes, path: str, method: str = "GET") -> tuple[int, str, http.client.HTTPResponse]:
    """Send a request; return the status, the body and the rest."""
    host, _, port = served.address.rpartition(":")
    with closing(http.client.HTTPConnection(host.strip("[]"), int(port), timeout=20)) as client:
        client.request(method, path)
        response = client.getresponse()
        return response.status, response.read().decode(), response


def connected(served: Probes) -> socket.socket:
    host, _, port = served.address.rpartition(":")
    return socket.create_connection((host, int(port)), timeout=20)


def test_a_process_whose_loops_turn_is_alive(serve):
    assert ask(serve(), "/livez")[:2] == (200, "ok\n")


def test_a_process_with_a_stuck_loop_is_not_and_says_which(serve):
    stuck = ["committer", "poller default"]
    assert ask(serve(alive=lambda: stuck), "/livez")[:2] == (503, "committer\npoller default\n")


def test_readiness_follows_the_worker_and_says_why_not(serve):
    reasons: list[str] = []
    served = serve(ready=lambda: reasons)
    assert ask(served, "/readyz")[:2] == (200, "ok\n")
    reasons.append("draining")
    assert ask(served, "/readyz")[:2] == (503, "draining\n")
    assert ask(served, "/livez")[0] == 200


def test_metrics_are_served_in_the_text_format(serve):
    status, body, response = ask(serve(metrics=Metrics(CollectorRegistry()).render), "/metrics")
    assert status == 200
    assert "gendurable_draining 0.0" in body
    assert response.headers["Content-Type"] == "text/plain; version=0.0.4; charset=utf-8"


def test_a_query_does_not_change_the_page(serve):
    assert ask(serve(), "/livez?verbose=1")[0] == 200


def test_head_answers_without_a_body(serve):
    status, body, response = ask(serve(ready=lambda: ["draining"]), "/readyz", "HEAD")
    assert (status, body) == (503, "")
    assert response.headers["Content-Length"] == str(len("draining\n"))


def test_other_paths_and_methods_are_refused(serve):
    served = serve()
    status, body, _ = ask(served, "/")
    assert status == 404
    assert "/livez, /readyz, /metrics" in body
    assert ask(served, "/livez/../etc/passwd")[0] == 404
    assert ask(served, "/livez", "POST")[0] == 501


def test_a_page_that_fails_is_an_error_and_the_next_one_works(serve):
    def broken() -> bytes:
        raise KeyError("slots")

    served = serve(metrics=broken)
    assert ask(served, "/metrics")[:2] == (500, "KeyError: 'slots'\n")
    assert ask(served, "/livez")[0] == 200


def test_nothing_is_written_to_stderr(serve, capfd):
    served = serve()
    ask(served, "/livez")
    ask(served, "/nowhere")
    with connected(served) as rude:
        rude.sendall(b"GET /met")
    ask(served, "/livez")
    assert capfd.readouterr() == ("", "")


def test_a_request_that_is_no_http_is_refused(serve):
    served = serve()
    with connected(served) as client:
        client.sendall(b"\x16\x03\x01\x02\x00" + b"x" * 100 + b"\r\n\r\n")
        assert b"400" in client.recv(10_000)
    assert ask(served, "/livez")[0] == 200


def test_requests_without_end_are_cut_short(serve):
    served = serve()
    with connected(served) as client:
        client.sendall(b"GET /livez HTTP/1.1\r\n" + b"X-Header: x\r\n" * 101 + b"\r\n")
        assert b" 431 " in client.recv(10_000)
    with connected(served) as client:
        client.sendall(b"GET /" + b"x" * 70_000 + b" HTTP/1.1\r\n")
        assert b" 414 " in client.recv(10_000)


def test_a_slow_client_is_hung_up_on(serve, monkeypatch):
    monkeypatch.setattr(probes, "SECONDS_PER_REQUEST", 0.1)
    with connected(serve()) as slow:
        slow.sendall(b"GET /livez HTTP/1.1\r\n")
        assert slow.recv(100) == b""


def test_clients_that_only_hold_connections_do_not_keep_probes_out(serve):
    served = serve()
    with ExitStack() as stack:
        idle = [stack.enter_context(connected(served)) for _ in range(3 * probes.MOST_CONNECTIONS)]
        assert ask(served, "/livez")[0] == 200
        assert idle[0].recv(100) == b""  # the oldest went
        until(lambda: threading.active_count() <= 2 * probes.MOST_CONNECTIONS, "the crowd's threads ended")


def test_a_probe_is_answered_while_another_one_hangs(serve):
    hanging, go_on = threading.Event(), threading.Event()

    def slow_metrics() -> bytes:
        hanging.set()
        go_on.wait(20)
        return b"done\n"

    served = serve(metrics=slow_metrics)
    answers: list[int] = []
    scrape = threading.Thread(target=lambda: answers.append(ask(served, "/metrics")[0]))
    scrape.start()
    assert hanging.wait(20)
    assert ask(served, "/livez")[0] == 200
    go_on.set()
    scrape.join()
    assert answers == [200]


def test_ipv6_is_served(serve):
    try:
        socket.create_server(("::1", 0), family=socket.AF_INET6).close()
    except OSError:
        pytest.skip("no IPv6 on this machine")
    served = serve("::1")
    assert served.address.startswith("[::1]:")
    assert ask(served, "/livez")[0] == 200


def test_an_address_that_is_taken_is_an_error_that_says_what_to_do(serve):
    host, _, port = serve().address.rpartition(":")
    with pytest.raises(
        AddressUnavailable, match=rf"127\.0\.0\.1:{port}: .*in use; stop .* or give another .* --http"
    ) as refused:
        serve(host, int(port))
    assert isinstance(refused.value, GenDurableError)


def test_an_address_of_another_machine_is_refused(serve):
    with pytest.raises(AddressUnavailable, match=r"192\.0\.2\.1:9464"):
        serve("192.0.2.1", 9464)


def test_after_the_end_the_address_is_free_again(serve):
    served = serve()
    host, _, port = served.address.rpartition(":")
    with connected(served) as waiting:
        served.stop()
        with suppress(ConnectionResetError):
            assert waiting.recv(100) == b""
    with pytest.raises(ConnectionRefusedError):
        connected(served)
    assert ask(serve(host, int(port)), "/livez")[0] == 200


def test_what_was_never_started_can_be_stopped():
    served = Probes("127.0.0.1", 0, alive=list, ready=list, metrics=bytes)
    served.stop()
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.1", int(served.address.rpartition(":")[2])))
