"""A service for tests of the dashboard: real HTTP on a free port, and pipelines worth looking at."""

from __future__ import annotations

import contextlib
import json
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import uvicorn

from firnline.clock import SystemClock
from firnline.service.access.guard import Rules
from firnline.service.access.sessions import Sessions
from firnline.service.access.tokens import ROLES, Tokens, hash_token
from firnline.service.api.common import Service
from firnline.service.app import make_app
from firnline.service.registry import Registry
from firnline.service.supervise.supervisor import Seen, Settings, Supervisor
from firnline.types import RandomIds
from tests.support.processes import free_port

PATIENCE_SECONDS = 120.0
LOCAL_RUN = (sys.executable, "-m", "tests.support.local_run")


@dataclass(frozen=True, slots=True)
class Served:
    """A service that answers."""

    url: str
    service: Service

    def wait_for(self, name: str, is_so: Callable[[Seen], bool]) -> Seen:
        """Wait until the supervisor has seen what a test waits for."""
        deadline = time.monotonic() + PATIENCE_SECONDS
        while time.monotonic() < deadline:
            seen = self.service.supervisor.get(name)
            if seen.glance is not None and is_so(seen):
                return seen
            time.sleep(0.05)
        raise AssertionError(f"not seen in time: {self.service.supervisor.get(name)}")

    def wait_for_state(self, name: str, *states: str) -> Seen:
        return self.wait_for(name, lambda seen: seen.glance is not None and seen.glance.state in states)


@contextlib.contextmanager
def serving(
    folder: Path,
    *,
    run_command: tuple[str, ...] = LOCAL_RUN,
    look_seconds: float = 0.2,
    only_watches: bool = False,
    port: int | None = None,
) -> Iterator[Served]:
    """Serve `folder/pipelines`. The tokens are `token-of-read`, `token-of-operate` and `token-of-admin`.

    The administrator's has the right `data`.
    """
    tokens = [
        {"name": role, "role": role, "hash": hash_token(f"token-of-{role}"), "data": role == "admin"} for role in ROLES
    ]
    file = folder / "tokens.json"
    file.write_text(json.dumps({"tokens": tokens}))
    file.chmod(0o600)
    clock = SystemClock()
    known = Tokens(file, clock)
    settings = Settings(
        str(folder / "state"),
        only_watches=only_watches,
        run_command=run_command,
        look_seconds=look_seconds,
        stagger_seconds=0.0,
    )
    registry = Registry([folder / "pipelines"], os.environ)
    port = port or free_port()
    with Supervisor(registry, settings, clock, RandomIds(), dict(os.environ)) as supervisor:
        service = Service(supervisor, known, Sessions(b"k" * 32, known, clock), clock)
        config = uvicorn.Config(make_app(service, Rules()), port=port, log_config=None, access_log=False)
        server = uvicorn.Server(config)
        thread = threading.Thread(target=server.run, name="test service", daemon=True)
        thread.start()
        deadline = time.monotonic() + PATIENCE_SECONDS
        while not server.started and time.monotonic() < deadline:
            time.sleep(0.02)
        assert server.started
        try:
            yield Served(f"http://127.0.0.1:{port}", service)
        finally:
            server.should_exit = True
            thread.join(PATIENCE_SECONDS)


def write_pipeline(folder: Path, name: str, **spec: Any) -> Path:
    """Write a pipeline file of its own folder: JSON, which is YAML."""
    home = folder / "pipelines" / name
    (home / "in").mkdir(parents=True, exist_ok=True)
    fields = [{"name": "k", "type": "string"}, {"name": "v", "type": "int64"}, {"name": "at", "type": "timestamp"}]
    source = {"type": "files", "path": "in", "schema": {"fields": fields}, "poll_interval_secs": 1}
    body = {"name": name, "sources": {"readings": source}, "sinks": [{"type": "delta", "table": "out"}], **spec}
    path = home / "firnline.yml"
    path.write_text(json.dumps(body))
    return path


STATEFUL = {
    "operators": [
        {
            "name": "totals",
            "type": "aggregate",
            "inputs": ["readings"],
            "keys": ["k"],
            "aggregates": [{"name": "n", "function": "count"}, {"name": "total", "function": "sum", "column": "v"}],
        }
    ],
    "sinks": [
        {"type": "delta", "name": "totals-table", "table": "out", "input": "totals", "write": "upsert"},
        {"type": "delta", "name": "readings-table", "table": "all", "input": "readings"},
    ],
    "state": {"shards": 4},
    "batch": {"max_files": 1},
}


def add_input(folder: Path, name: str, number: int, rows: int = 200, *, bad: str = "") -> None:
    """Add one file of input to a pipeline, whole at once."""
    lines = [
        json.dumps({"k": f"sensor-{index % 17}", "v": index, "at": "2026-05-01T12:00:00Z"}) for index in range(rows)
    ]
    inputs = folder / "pipelines" / name / "in"
    (inputs / f".{number:05d}").write_text("\n".join([*lines, *([bad] if bad else [])]) + "\n")
    os.rename(inputs / f".{number:05d}", inputs / f"{number:05d}.ndjson")
