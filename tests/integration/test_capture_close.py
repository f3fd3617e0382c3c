"""A captured source that a run closes while another of its threads plans."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest

from firnline.run.open_pipeline import open_pipeline
from firnline.sources.base import Limits
from firnline.sources.cdc.source import LogSource
from firnline.sources.guard import GuardedSource
from tests.support.captured import ORDERS, captured, execute

LIMITS = Limits(10, 1 << 20, 1000, 1000, 10, 1)


def threads() -> set[str]:
    return {one.name for one in threading.enumerate() if one.name in ("firnline log db", "firnline tables db")}


@pytest.mark.parametrize("method", ["_make_spooler", "_log_end", "_choose", "_has_all"])
def test_a_plan_that_is_overtaken_by_the_end_of_the_run(
    postgres: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, method: str
) -> None:
    """It neither fails nor waits, and no thread is left that reads the log."""
    execute(postgres, ORDERS)
    source = open_pipeline(captured(postgres, tmp_path), once=True).sources["db"]
    assert isinstance(source, GuardedSource)
    assert isinstance(source.inner, LogSource)
    inner = getattr(source.inner, method)

    def closing(*arguments: Any, **more: Any) -> Any:
        found = inner(*arguments, **more)
        source.close()
        return [] if method == "_choose" else False if method == "_has_all" else found

    monkeypatch.setattr(source.inner, method, closing)
    source.claimed(lambda: None)
    if method == "_has_all":
        monkeypatch.setattr(source.inner, "_choose", lambda *_, **__: [])
    first = source.plan(source.start(None), LIMITS)
    assert first is None or method == "_log_end"  # what was spooled by then may be planned
    assert source.plan(source.start(None), LIMITS) is None
    assert threads() == set()
