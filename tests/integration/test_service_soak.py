"""Thousands of requests and listeners that come and go: objects, threads and open files of the service level off."""

from __future__ import annotations

import contextlib
import gc
import http.client
import os
import threading
import time
from pathlib import Path

import psutil
import pytest

from firnline.pipeline import Pipeline
from firnline.service import answers, events
from firnline.service.access.tokens import ROLES
from firnline.service.events import PER_TOKEN
from firnline.testing.local import run_locally
from tests.support.dashboards import PATIENCE_SECONDS, Served, add_input, serving, write_pipeline

REQUESTS = int(os.environ.get("FIRNLINE_SOAK_REQUESTS", "2400"))
NAMES = ("flights", "orders", "clicks")
PARTS = ("", "/status", "/checkpoints", "/epochs", "/sinks", "/sources", "/files", "/runs", "/audit", "/spec", "/trend")
ROUNDS = 8
KEPT_BYTES = 100_000


class Visitor:
    """A client of one role that keeps its connection."""

    def __init__(self, served: Served, role: str) -> None:
        self._connection = http.client.HTTPConnection(served.url.removeprefix("http://"), timeout=PATIENCE_SECONDS)
        self._headers = {"Authorization": f"Bearer token-of-{role}"}

    def ask(self, path: str, method: str = "GET") -> int:
        self._connection.request(method, path, headers=self._headers)
        answer = self._connection.getresponse()
        answer.read()
        return answer.status

    def close(self) -> None:
        self._connection.close()


def visit(served: Served, requests: int, turn: int) -> None:
    """Ask for everything, in every role: pages, REST, what is not there, what is refused, and actions."""
    for role in ROLES:
        visitor = Visitor(served, role)
        for number in range(requests // len(ROLES)):
            name, part = NAMES[number % len(NAMES)], PARTS[number // len(NAMES) % len(PARTS)]
            path = (
                f"/api/v1/pipelines/{name}{part}?turn={turn}-{number}",  # nobody asked for it before
                f"/p/{name}{part if part not in ('/status', '') else ''}",
                "/",
                "/metrics",
                f"/api/v1/pipelines/no-{turn}-{number}",
            )[number % 5]
            assert visitor.ask(path) == (404 if "/no-" in path else 200), path
            if number % 20 == 0:
                visitor.ask(f"/api/v1/pipelines/{name}/pause", "POST")
        visitor.close()


def listen(served: Served) -> None:
    """Have as many listeners as may be, and have them leave without a word."""
    with contextlib.ExitStack() as stack:
        for role in ROLES:
            for _ in range(PER_TOKEN - 1):
                connection = http.client.HTTPConnection(served.url.removeprefix("http://"), timeout=PATIENCE_SECONDS)
                stack.callback(connection.close)
                connection.request("GET", "/api/v1/events", headers={"Authorization": f"Bearer token-of-{role}"})
                answer = connection.getresponse()
                assert answer.status == 200
                assert answer.readline().startswith(b"retry: ")
                stack.callback(answer.close)
        served.service.events.publish("pipeline", {"pipeline": "flights"})


def settle(served: Served) -> tuple[int, int, int]:
    """Wait until the listeners are gone; return objects, threads and open files."""
    listened = served.service.events
    deadline = time.monotonic() + PATIENCE_SECONDS
    while listened._listeners and time.monotonic() < deadline:
        listened.publish("pipeline", {"pipeline": "flights"})  # who is gone is noticed when something is sent
        time.sleep(0.05)
    assert not listened._listeners
    gc.collect()
    return len(gc.get_objects()), threading.active_count(), psutil.Process().num_fds()


@pytest.mark.timeout(900)
def test_a_long_time_with_many_visitors(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(answers, "MOST_BYTES", KEPT_BYTES)  # what is bounded is full before the half
    monkeypatch.setattr(events, "KEPT", 20)
    for name in NAMES:
        path = write_pipeline(tmp_path, name)
        add_input(tmp_path, name, 0, 20, bad="not json")
        run_locally(Pipeline.load(path).options)
    readings = []
    with serving(tmp_path, only_watches=True) as served:
        for name in NAMES:
            served.wait_for(name, lambda seen: seen.glance is not None)
        for turn in range(ROUNDS):
            visit(served, REQUESTS // ROUNDS, turn)
            listen(served)
            readings.append(settle(served))
        assert served.service.answers._size_bytes <= KEPT_BYTES
        assert not served.service.answers._under_way
    settled, last = readings[ROUNDS // 2 - 1], readings[-1]
    later = REQUESTS // 2  # a leak of one object per request would show as this
    assert last[0] - settled[0] < later // 4, readings
    assert last[1] <= settled[1] + 4, readings  # threads for requests end by themselves when they are idle
    assert last[2] <= settled[2] + 8, readings
