"""Connections of clients: how many there are at once, and how long one may say nothing.

Whoever reaches the port can open connections, with or without a token. They are limited, and those that ask nothing are
closed, so that they never take the descriptors that the supervisor, the homes and other clients need.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import resource
import socket
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from firnline.types import Clock

logger = logging.getLogger(__name__)

MOST_CONNECTIONS = 512
MOST_AT_ONCE = 16  # accepted in one turn of the server's loop
KEPT_DESCRIPTORS = 256  # for the supervisor, homes, stores and logs
REQUEST_SECONDS = 10.0  # for TLS and the first line and headers of a request
IDLE_SECONDS = 20.0  # between two requests; the server itself is done after 5 s of silence
BODY_SECONDS = 30.0  # for the body of a request
READ_SECONDS = 60.0  # a client that takes nothing of its answer for so long is sent away


def find_limit(most: int = MOST_CONNECTIONS) -> int:
    """Return how many connections there may be: what the limit of open files leaves, at least 16."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY:
        return most
    return max(16, min(most, (soft - KEPT_DESCRIPTORS) // 2))


@dataclass(slots=True)
class Connection:
    """One connection. `protocol` is that of the server, once TLS stands."""

    socket: socket.socket
    since: float  # when the phase began
    protocol: Any = None
    phase: str = "silent"
    cycle: Any = None  # the newest request

    def look(self, now: float) -> str:
        """Return the phase of the connection, and remember when it began."""
        phase, cycle = find_phase(self.protocol), getattr(self.protocol, "cycle", None)
        if phase != self.phase or cycle is not self.cycle:
            self.phase, self.cycle, self.since = phase, cycle, now
        return phase


_SECONDS = {"silent": REQUEST_SECONDS, "body": BODY_SECONDS, "idle": IDLE_SECONDS, "stuck": READ_SECONDS}


def find_phase(protocol: Any) -> str:
    """Return what a connection is at: silent (no request yet), body, busy, stuck (the client reads nothing), idle."""
    cycle = protocol.cycle if protocol is not None else None
    if cycle is None:
        return "silent"
    if protocol.flow.write_paused:
        return "stuck"
    if cycle.response_complete:
        return "idle"
    return "body" if cycle.more_body else "busy"


class Connections:
    """The connections of one server. Everything here is called from the server's loop."""

    def __init__(self, clock: Clock, limit: int | None = None) -> None:
        self._clock = clock
        self._limit = find_limit() if limit is None else limit
        self._open: dict[int, Connection] = {}  # by descriptor
        self._is_full = False
        self._burst = 0

    def accept(self, accepted: socket.socket) -> None:
        """Count a new connection. If there are too many, the one goes that has asked nothing for longest.

        Raises:
            ConnectionAbortedError: all others are being answered, so that the new one was closed.
        """
        now = self._clock.monotonic()
        if len(self._open) >= self._limit:
            self._log_full()
            quiet = [one for one in self._open.values() if one.look(now) in _SECONDS]
            if not quiet:
                accepted.close()
                raise ConnectionAbortedError("too many connections")
            self._close(min(quiet, key=lambda one: one.since))
        self._open[accepted.fileno()] = Connection(accepted, now)

    def attach(self, descriptor: int, protocol: Any) -> None:
        """Name the protocol that serves a connection."""
        if (found := self._open.get(descriptor)) is not None:
            found.protocol = protocol

    def forget(self, descriptor: int) -> None:
        """A connection was closed."""
        self._open.pop(descriptor, None)
        if len(self._open) < self._limit // 2:
            self._is_full = False

    def sweep(self) -> None:
        """Close connections that take too long."""
        now = self._clock.monotonic()
        for one in list(self._open.values()):
            seconds = _SECONDS.get(one.look(now))
            if seconds is not None and now - one.since > seconds:
                self._close(one)

    def __len__(self) -> int:
        return len(self._open)

    def pace(self) -> None:
        """Take a few connections at a time, so that those which go are gone before more come.

        Raises:
            BlockingIOError: the next ones wait for the next turn of the loop.
        """
        if self._burst >= MOST_AT_ONCE:
            raise BlockingIOError
        if self._burst == 0:
            asyncio.get_running_loop().call_soon(self._end_burst)
        self._burst += 1

    def _end_burst(self) -> None:
        self._burst = 0

    def _close(self, one: Connection) -> None:
        """End a connection: the server sees it as closed by the client."""
        transport = getattr(one.protocol, "transport", None)
        if transport is not None:
            transport.abort()
        with contextlib.suppress(OSError):
            one.socket.shutdown(socket.SHUT_RDWR)
        self._open.pop(one.socket.fileno(), None)

    def _log_full(self) -> None:
        if not self._is_full:
            self._is_full = True
            logger.warning("%d connections are open: those that ask nothing are closed for new ones", self._limit)


class _Accepted(socket.socket):
    """An accepted connection, which says when it is closed."""

    forget: Callable[[int], None]

    def close(self) -> None:
        descriptor = self.fileno()
        super().close()
        if descriptor >= 0:
            self.forget(descriptor)


class ListeningSocket(socket.socket):
    """A listening socket that counts what it accepts."""

    connections: Connections

    def accept(self) -> tuple[socket.socket, Any]:
        self.connections.pace()
        descriptor, address = self._accept()  # type: ignore[attr-defined]
        accepted = _Accepted(self.family, self.type, self.proto, fileno=descriptor)
        accepted.forget = self.connections.forget
        self.connections.accept(accepted)
        return accepted, address


def counted(listening: socket.socket, connections: Connections) -> ListeningSocket:
    """Return the listening socket as one that counts; the one that was given is not to be used any more."""
    found = ListeningSocket(listening.family, listening.type, listening.proto, fileno=listening.detach())
    found.connections = connections
    return found
