"""A TCP proxy for lost answers: requests reach the server, and what happens to the answers is up to the test.

    with running_proxy(server.port) as proxy:
        proxy.treat("drop", after=3)              # the next three answers pass, all later ones are lost
        proxy.treat("reset", on=lambda data: b"COMMIT" in data)   # the answer to the first such request
        ...
        proxy.wait_until_hit()
        proxy.heal()

An answer is what the server sends between two requests of one connection, or one piece of it if it is long. Treatments:

    drop     the answer is lost; the connection stays open and silent
    delay    the answer comes late, by `seconds`
    freeze   the answer, and all that follows, waits until `heal`
    reset    the client gets a reset instead of the answer; the server sees the connection end
    refuse   as reset, and new connections are closed at once until `heal`
"""

from __future__ import annotations

import contextlib
import socket
import struct
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Literal

Treatment = Literal["drop", "delay", "freeze", "reset", "refuse"]
PIECE = 1 << 16


@dataclass
class _Rule:
    treatment: Treatment
    after: int  # answers that still pass
    on: Callable[[bytes], bool] | None  # the request that arms the rule
    seconds: float
    armed: threading.Event
    connection: _Connection | None = None  # the one whose request has armed it; None: all


class Proxy:
    """Stands before one server on 127.0.0.1."""

    def __init__(self, target: int, port: int = 0) -> None:
        self._target = target
        self._lock = threading.Lock()
        self._rule: _Rule | None = None
        self._hit = threading.Event()
        self._healed = threading.Event()
        self._healed.set()
        self._is_refusing = False
        self._is_closed = False
        self._connections: set[_Connection] = set()
        self._listener = socket.create_server(("127.0.0.1", port))
        self.port = int(self._listener.getsockname()[1])
        self.requests = 0
        self.answers = 0  # that the server has sent
        self.hit_request = b""  # the last request of the connection whose answer was met first
        threading.Thread(target=self._accept, name=f"proxy-{self.port}", daemon=True).start()

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self.port}"

    def treat(
        self,
        treatment: Treatment,
        *,
        after: int = 0,
        on: Callable[[bytes], bool] | None = None,
        seconds: float = 1.0,
    ) -> None:
        """Treat answers so, from now on until `heal`.

        Args:
            treatment: What happens to them; see the module.
            after: So many answers pass first.
            on: Begins with the answer to the first request for which this is true, on that connection alone.
            seconds: The delay of `delay`.
        """
        armed = threading.Event()
        if on is None:
            armed.set()
        with self._lock:
            self._hit.clear()
            self._healed.clear()
            self._rule = _Rule(treatment, after, on, seconds, armed)

    def heal(self) -> None:
        """Let everything pass again; what `freeze` held back is sent. What was dropped stays lost."""
        with self._lock:
            self._rule = None
            self._is_refusing = False
            self._healed.set()

    def wait_until_hit(self, seconds: float = 120) -> None:
        """Wait until a rule has met an answer."""
        assert self._hit.wait(seconds), f"no answer was met within {seconds:.0f} s ({self.answers} passed)"

    @property
    def was_hit(self) -> bool:
        return self._hit.is_set()

    def cut(self) -> None:
        """Reset every connection now."""
        with self._lock:
            connections = list(self._connections)
        for connection in connections:
            connection.reset()

    def close(self) -> None:
        self._is_closed = True
        with contextlib.suppress(OSError):  # wakes `accept`
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        self.heal()
        self.cut()

    # -- for the threads --

    def _accept(self) -> None:
        while True:
            try:
                client, _ = self._listener.accept()
            except OSError:
                return
            if self._is_refusing:
                _reset(client)
                continue
            try:
                server = socket.create_connection(("127.0.0.1", self._target), timeout=120)
            except OSError:  # the server is down: so the client sees it
                _reset(client)
                continue
            server.settimeout(None)
            connection = _Connection(self, client, server)
            with self._lock:
                self._connections.add(connection)
            connection.start()

    def _saw_request(self, connection: _Connection, data: bytes) -> None:
        with self._lock:
            self.requests += 1
            connection.last_request = data
            rule = self._rule
            if rule is not None and rule.on is not None and not rule.armed.is_set() and rule.on(data):
                rule.connection = connection
                rule.armed.set()

    def _treatment(self, connection: _Connection) -> _Rule | None:
        """Count an answer; return the rule that it meets."""
        with self._lock:
            self.answers += 1
            rule = self._rule
            if rule is None or not rule.armed.is_set() or rule.connection not in (None, connection):
                return None
            if rule.after > 0:
                rule.after -= 1
                return None
            self._is_refusing = rule.treatment == "refuse"
            if not self._hit.is_set():
                self.hit_request = connection.last_request
            self._hit.set()
            return rule

    def _forget(self, connection: _Connection) -> None:
        with self._lock:
            self._connections.discard(connection)


class _Connection:
    """One client's connection and the one to the server, with a thread for each direction."""

    def __init__(self, proxy: Proxy, client: socket.socket, server: socket.socket) -> None:
        self._proxy = proxy
        self._client = client
        self._server = server
        self._is_reset = False
        self.last_request = b""
        for end in (client, server):
            end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def start(self) -> None:
        for target in (self._pass_requests, self._pass_answers):
            threading.Thread(target=target, name=f"proxy-{self._proxy.port}", daemon=True).start()

    def reset(self) -> None:
        self._is_reset = True
        _reset(self._client)
        _reset(self._server)

    def _pass_requests(self) -> None:
        with contextlib.suppress(OSError):
            while data := self._client.recv(PIECE):
                self._proxy._saw_request(self, data)
                self._server.sendall(data)
            if not self._is_reset:
                self._server.shutdown(socket.SHUT_WR)

    def _pass_answers(self) -> None:
        with contextlib.suppress(OSError):
            while data := self._server.recv(PIECE):
                rule = self._proxy._treatment(self)
                if rule is not None and not self._treat(rule):
                    continue
                self._client.sendall(data)
            if not self._is_reset:  # else the client would see an end instead of a reset
                self._client.shutdown(socket.SHUT_WR)
        if not self._is_reset:
            for end in (self._client, self._server):
                with contextlib.suppress(OSError):
                    end.shutdown(socket.SHUT_RDWR)
                end.close()
        self._proxy._forget(self)

    def _treat(self, rule: _Rule) -> bool:
        """Treat an answer; False: it is not sent."""
        if rule.treatment == "drop":
            return False
        if rule.treatment in ("reset", "refuse"):
            self.reset()
            return False
        # `heal` ends a delay, too.
        self._proxy._healed.wait(rule.seconds if rule.treatment == "delay" else None)
        return True


def _reset(end: socket.socket) -> None:
    """Close with RST instead of FIN; wakes threads that read from the socket."""
    with contextlib.suppress(OSError):
        end.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    with contextlib.suppress(OSError):
        end.shutdown(socket.SHUT_RD)
    end.close()


def kafka_call(*api_keys: int) -> Callable[[bytes], bool]:
    """Return a condition for `Proxy.treat(on=...)`: a Kafka request with one of these API keys (26 is EndTxn)."""

    def matches(data: bytes) -> bool:
        start = 0
        while start + 6 <= len(data):
            length, api_key = struct.unpack_from(">ih", data, start)
            if api_key in api_keys:
                return True
            start += 4 + max(0, length)
        return False

    return matches


@contextlib.contextmanager
def running_proxy(target: int, *, port: int = 0) -> Iterator[Proxy]:
    """A proxy before the server at this port of 127.0.0.1; on a free port unless one is given."""
    proxy = Proxy(target, port)
    try:
        yield proxy
    finally:
        proxy.close()
