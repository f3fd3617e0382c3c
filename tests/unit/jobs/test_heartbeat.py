from __future__ import annotations

import contextlib
import os
import threading
from pathlib import Path
from typing import Any

import pytest

from firnline.errors import EngineError, WorkerLostError
from firnline.jobs import heartbeat
from firnline.jobs.heartbeat import Watch, pinging, run_watched, watching
from firnline.testing.local import LocalEngine
from firnline.types import Json
from tests.support.processes import wait_until


def _watch(folder: str, ping_seconds: float = 0.02, timeout_seconds: float = 60) -> Watch:
    return Watch("job", {"root": folder, "storage_options": {}, "folder": "x"}, ping_seconds, timeout_seconds)


def test_a_task_that_pings_is_not_lost_and_leaves_no_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Hours pass between two looks at its heartbeat, by a clock of the test's own; each look finds a new one."""
    lost: list[str] = []
    hours, ended, folder, look = iter(range(1000)), threading.Event(), tmp_path / "x", heartbeat._silent
    now = [0.0]

    def beats() -> set[int]:
        with contextlib.suppress(FileNotFoundError):  # the task ends
            return {path.stat().st_mtime_ns for path in folder.glob("ping-*")}
        return set()

    def look_later(path: str, seen: dict[str, tuple[int, float]]) -> list[tuple[str, float]]:
        known = {beat for beat, _ in seen.values()}
        wait_until(lambda: ended.is_set() or bool(beats() - known))
        if not ended.is_set():
            now[0] = 3600.0 * next(hours)
        return look(path, seen)

    monkeypatch.setattr(heartbeat, "_silent", look_later)
    monkeypatch.setattr(heartbeat, "monotonic", lambda: now[0])
    with (
        watching(str(folder), 0.001, lambda name, _: lost.append(name)),
        pinging(_watch(str(tmp_path), 0.005).ping("shard 3 of operator a/b")),
    ):
        wait_until(lambda: bool(lost) or now[0] > 10 * 3600)
        ended.set()
    assert lost == []
    assert os.listdir(folder) == []


def test_a_task_that_stopped_pinging_is_lost(tmp_path: Path) -> None:
    (tmp_path / "ping-shard 2").touch()  # once, and never again
    lost, told = [], threading.Event()

    def tell(name: str, seconds: float) -> None:
        lost.append((name, seconds > 0.03))
        told.set()

    with watching(str(tmp_path), 0.01, tell):
        assert told.wait(120)
    assert lost == [("shard 2", True)]


class _Hanging(LocalEngine):
    """A task pings once and hangs; its job ends when it is cancelled."""

    def __init__(self, folder: Path) -> None:
        super().__init__(1)
        self._folder = folder
        self._cancelled = threading.Event()

    def run(
        self, tag: str, orders: list[dict[str, Json]], timeout_seconds: float | None = None
    ) -> list[dict[str, Json]]:
        (self._folder / "x").mkdir()
        (self._folder / "x" / f"ping-{orders[0]['ping']['name']}").touch()
        assert self._cancelled.wait(120)
        raise EngineError("cancelled")

    def cancel(self, tag: str) -> None:
        self._cancelled.set()


def test_a_job_with_a_task_that_hangs_is_given_up(tmp_path: Path) -> None:
    orders: list[dict[str, Any]] = [{"kind": "read"}]
    with pytest.raises(WorkerLostError, match="task 0 of source a was silent"):
        run_watched(_Hanging(tmp_path), _watch(str(tmp_path)), orders, lambda n: f"task {n} of source a")


def test_on_an_object_store_only_the_time_limit_holds() -> None:
    watch = _watch("s3://bucket/x")
    with pinging(watch.ping("a")), watch.job(lambda _: None):
        pass
