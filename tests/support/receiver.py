"""A receiver of HTTP sinks: keeps requests, answers as a test says, and takes each Idempotency-Key once."""

from __future__ import annotations

import contextlib
import json
import ssl
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class Request:
    """One request as it came."""

    method: str
    path: str
    headers: dict[str, str]
    body: bytes

    @property
    def key(self) -> str:
        return self.headers["idempotency-key"]

    @property
    def rows(self) -> list[dict[str, Any]]:
        if self.headers["content-type"] == "application/json":
            return list(json.loads(self.body))
        return [json.loads(line) for line in self.body.splitlines()]


@dataclass(frozen=True)
class Reply:
    """An answer: status, headers and text. `hangs` never sends it, `takes` keeps the rows all the same."""

    status: int
    headers: dict[str, str] = field(default_factory=dict)
    text: str = ""
    hangs: bool = False
    takes: bool = False


# Request and how many came before -> the answer; None takes the rows and answers 200.
Behaviour = Callable[[Request, int], Reply | None]


class Receiver:
    """Rows that were taken, by key, and every request in order. With `forgets_keys` a repeat is taken again."""

    def __init__(self, *, forgets_keys: bool = False, tls: tuple[Path, Path] | None = None) -> None:
        self.requests: list[Request] = []
        self.taken: list[Request] = []
        self.behaviour: Behaviour = lambda _request, _number: None
        self._forgets_keys = forgets_keys
        self._lock = threading.Lock()
        self._closed = threading.Event()
        receiver = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def answer(self) -> None:
                body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
                headers = {name.lower(): value for name, value in self.headers.items()}
                reply = receiver.receive(Request(self.command, self.path, headers, body))
                if reply.hangs:
                    receiver._closed.wait(120)
                    self.close_connection = True
                    return
                data = reply.text.encode()
                self.send_response(reply.status)
                for name, value in reply.headers.items():
                    self.send_header(name, value)
                self.send_header("Content-Length", str(len(data)))
                self.end_headers()
                with contextlib.suppress(OSError):
                    self.wfile.write(data)

            do_POST = do_PUT = answer  # noqa: N815  # names of the standard library

            def log_message(self, *_arguments: Any) -> None:
                """Say nothing."""

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        self._scheme = "https" if tls else "http"
        if tls is not None:
            context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
            context.load_cert_chain(*tls)
            self._server.socket = context.wrap_socket(
                self._server.socket, server_side=True, do_handshake_on_connect=False
            )
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.05,), daemon=True)
        self._thread.start()

    @property
    def port(self) -> int:
        return int(self._server.server_address[1])

    @property
    def url(self) -> str:
        return f"{self._scheme}://localhost:{self.port}/rows"

    def receive(self, request: Request) -> Reply:
        with self._lock:
            self.requests.append(request)
            reply = self.behaviour(request, len(self.requests) - 1)
            known = not self._forgets_keys and any(one.key == request.key for one in self.taken)
            if (reply is None or reply.takes) and not known:
                self.taken.append(request)
            return reply or Reply(200)

    @property
    def rows(self) -> list[dict[str, Any]]:
        """All rows that were taken, in the order in which they came."""
        with self._lock:
            return [row for request in self.taken for row in request.rows]

    @property
    def ids(self) -> Counter[int]:
        return Counter(int(row["id"]) for row in self.rows)

    def check_repeats(self) -> None:
        """A key that came more than once came with the same rows every time."""
        bodies: dict[str, bytes] = {}
        for request in self.requests:
            assert bodies.setdefault(request.key, request.body) == request.body, request.key

    def close(self) -> None:
        self._closed.set()
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


@contextlib.contextmanager
def running_receiver(*, forgets_keys: bool = False, tls: tuple[Path, Path] | None = None) -> Iterator[Receiver]:
    """A receiver on 127.0.0.1; with certificate and key it speaks TLS."""
    receiver = Receiver(forgets_keys=forgets_keys, tls=tls)
    try:
        yield receiver
    finally:
        receiver.close()
