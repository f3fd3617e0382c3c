from __future__ import annotations

import os
import threading
from pathlib import Path
from typing import Any

import pytest

from firnline.errors import EngineError, WorkerLostError
from firnline.jobs.heartbeat import Watch, pinging, run_watched, watching
from firnline.testing.local import LocalEngine
from firnline.types import Json


def _watch(folder: str, ping_seconds: float = 0.02, timeout_seconds: float = 60) -> Watch:
    return Watch("job", {"root": folder, "storage_options": {}, "folder": "x"}, ping_seconds, timeout_seconds)


def test_a_task_that_pings_is_not_lost_and_leaves_no_file(tmp_path: Path) -> None:
    lost: list[str] = []
    with (
        watching(str(tmp_path / "x"), 0.05, lambda name, _: lost.append(name)),
        pinging(_watch(str(tmp_path), 0.005).ping("shard 3 of operator a/b")),
    ):
        threading.Event().wait(0.3)
    assert lost == []
    assert os.listdir(tmp_path / "x") == []


def test_a_task_that_stopped_pinging_is_lost(tmp_path: Path) -> None:
    (tmp_path / "ping-shard 2").touch()  # once, and never again
    lost, told = [], threading.Event()

    def tell(name: str, seconds: float) -> None:
        lost.append((name, seconds > 0.03))
        told.set()

    with watching(str(tmp_path), 0.01, tell):
        assert told.wait(10)
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
        assert self._cancelled.wait(30)
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
