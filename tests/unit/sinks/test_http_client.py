"""The client of HTTP sinks against servers that answer slowly, without end, or not at all."""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Iterator

import pytest

from firnline.clock import SystemClock, monotonic
from firnline.http_address import HttpAddress
from firnline.sinks.http.client import AnswerLostError, HttpClient

CHUNKED = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n"
# What comes at once, and what then comes again and again: none of them ever is a whole answer.
DRIPS = {
    "silent": (b"", b""),
    "status": (b"HTTP/1.1 20", b"0"),
    "headers": (b"HTTP/1.1 200 OK\r\n", b"X-A: b\r\n"),
    "one header": (b"HTTP/1.1 200 OK\r\nX:", b"a"),
    "100 Continue": (b"", b"HTTP/1.1 100 Continue\r\n\r\n"),
    "size of a chunk": (CHUNKED + b"1;", b"a"),
    "trailer": (CHUNKED + b"0\r\n", b"A: b\r\n"),
    "body": (b"HTTP/1.1 200 OK\r\nContent-Length: 100000\r\n\r\n", b"a"),
    "body until the end": (b"HTTP/1.1 200 OK\r\nConnection: close\r\n\r\n", b"a"),
}


@contextlib.contextmanager
def dripping(first: bytes, again: bytes, seconds: float) -> Iterator[int]:
    """A server that answers one request so; yields its port."""
    ended = threading.Event()

    def serve() -> None:
        with contextlib.suppress(OSError):
            client, _ = listener.accept()
            with client:
                client.recv(1 << 16)
                client.sendall(first)
                while not ended.wait(seconds):
                    client.sendall(again)

    with socket.create_server(("127.0.0.1", 0)) as listener:
        thread = threading.Thread(target=serve, daemon=True)
        thread.start()
        yield int(listener.getsockname()[1])
        ended.set()
    thread.join()


def open_client(port: int, seconds: float) -> HttpClient:
    address = HttpAddress.parse(f"http://127.0.0.1:{port}/rows", allow_http=False)
    return HttpClient(address, "POST", {}, hmac_secret="", ca_file="", timeout_secs=seconds, clock=SystemClock())


@pytest.mark.timeout(120)
@pytest.mark.parametrize("drip", DRIPS)
def test_an_answer_that_drips_is_lost_when_its_time_is_over(drip: str) -> None:
    with dripping(*DRIPS[drip], seconds=0.02) as port:
        client, began = open_client(port, 0.3), monotonic()
        with pytest.raises(AnswerLostError):
            client.send(b"{}", "key", {})
        assert monotonic() - began >= 0.3
        client.close()


def test_an_endless_answer_is_cut_and_its_status_counts() -> None:
    with dripping(b"HTTP/1.1 200 OK\r\n\r\n", b"a" * 50_000, seconds=0.0) as port:
        client = open_client(port, 60)
        assert client.send(b"{}", "key", {}).status == 200
