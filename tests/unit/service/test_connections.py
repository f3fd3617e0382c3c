"""Connections of strangers: how many, how long they may say nothing, and whom they cannot push out."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from contextlib import ExitStack
from types import SimpleNamespace
from typing import Any

import pytest

from firnline.clock import SystemClock
from firnline.service.connections import (
    BODY_SECONDS,
    IDLE_SECONDS,
    READ_SECONDS,
    REQUEST_SECONDS,
    Connections,
    find_limit,
)


class Time(SystemClock):
    now_seconds = 0.0

    def monotonic(self) -> float:
        return self.now_seconds


class Transport:
    is_aborted = False

    def abort(self) -> None:
        self.is_aborted = True


def protocol(*, complete: bool = False, more_body: bool = False, paused: bool = False, asked: bool = True) -> Any:
    cycle = SimpleNamespace(response_complete=complete, more_body=more_body) if asked else None
    return SimpleNamespace(cycle=cycle, flow=SimpleNamespace(write_paused=paused), transport=Transport())


@pytest.fixture
def sockets() -> Iterator[Any]:
    with ExitStack() as stack:

        def make() -> socket.socket:
            ours, theirs = socket.socketpair()
            stack.callback(ours.close)
            stack.callback(theirs.close)
            return ours

        yield make


@pytest.mark.parametrize(
    ("state", "seconds"),
    [
        ({"asked": False}, REQUEST_SECONDS),
        ({"more_body": True}, BODY_SECONDS),
        ({"complete": True}, IDLE_SECONDS),
        ({"paused": True}, READ_SECONDS),
        ({}, None),  # it is being answered, however long that takes
    ],
)
def test_who_takes_too_long_is_sent_away(sockets: Any, state: dict[str, bool], seconds: float | None) -> None:
    clock = Time()
    connections = Connections(clock, limit=2)
    one, of = sockets(), protocol(**state)
    connections.accept(one)
    connections.attach(one.fileno(), of)
    connections.sweep()
    clock.now_seconds = (seconds or 1000.0) - 0.1
    connections.sweep()
    assert not of.transport.is_aborted
    clock.now_seconds += 10_000 if seconds is None else 0.2
    connections.sweep()
    assert of.transport.is_aborted == (seconds is not None)


def test_a_client_that_asks_again_and_again_stays(sockets: Any) -> None:
    clock = Time()
    connections = Connections(clock, limit=2)
    one, of = sockets(), protocol(complete=True)
    connections.accept(one)
    connections.attach(one.fileno(), of)
    for _ in range(10):
        of.cycle = SimpleNamespace(response_complete=True, more_body=False)
        connections.sweep()
        clock.now_seconds += IDLE_SECONDS - 1
    assert not of.transport.is_aborted


def test_the_one_that_asked_nothing_for_longest_goes_for_a_new_one(sockets: Any) -> None:
    clock = Time()
    connections = Connections(clock, limit=3)
    busy, silent, newer = protocol(), protocol(asked=False), protocol(asked=False)
    for of in (busy, silent, newer):
        one = sockets()
        connections.accept(one)
        connections.attach(one.fileno(), of)
        clock.now_seconds += 1
    connections.accept(sockets())
    assert [of.transport.is_aborted for of in (busy, silent, newer)] == [False, True, False]
    assert len(connections) == 3


def test_a_new_one_is_refused_if_all_others_are_answered(sockets: Any) -> None:
    connections = Connections(Time(), limit=1)
    one, of = sockets(), protocol()
    connections.accept(one)
    connections.attach(one.fileno(), of)
    refused = sockets()
    with pytest.raises(ConnectionAbortedError):
        connections.accept(refused)
    assert refused.fileno() == -1
    connections.forget(one.fileno())
    connections.accept(sockets())


def test_connections_leave_descriptors_for_the_supervisor(monkeypatch: pytest.MonkeyPatch) -> None:
    for soft, most in ((1024, 384), (256, 16), (65536, 512), (-1, 512)):
        monkeypatch.setattr("resource.getrlimit", lambda _, soft=soft: (soft, soft))
        assert find_limit() == most
