from __future__ import annotations

import os
import threading
from pathlib import Path

from firnline.engine.pings import ping_path, pinging, watching


def test_a_task_that_pings_is_not_lost_and_leaves_no_file(tmp_path: Path) -> None:
    place = {"root": str(tmp_path), "storage_options": {}, "folder": "x"}
    path = ping_path(place, "totals", 3)
    assert path is not None
    lost: list[int] = []
    with watching({3: path}, 0.02, lambda shard, _: lost.append(shard)), pinging(path, 0.005):
        threading.Event().wait(0.3)
    assert lost == []
    assert not os.path.exists(path)


def test_a_task_that_stopped_pinging_is_lost(tmp_path: Path) -> None:
    path = tmp_path / "ping"
    path.touch()  # once, and never again
    lost, told = [], threading.Event()

    def tell(shard: int, seconds: float) -> None:
        lost.append((shard, seconds > 0.03))
        told.set()

    with watching({1: str(tmp_path / "not yet"), 2: str(path)}, 0.01, tell):
        assert told.wait(10)
    assert lost == [(2, True)]


def test_an_object_store_has_no_pings() -> None:
    assert ping_path({"root": "s3://bucket/x", "storage_options": {}, "folder": "x"}, "totals", 0) is None
