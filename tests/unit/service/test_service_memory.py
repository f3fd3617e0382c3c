"""What the service loads: nothing that only runs need. A compiler, data frames and a database take 130 MB.

And how it keeps memory: in two pools of the C library, where it has any.
"""

from __future__ import annotations

import ctypes
import subprocess
import sys
from types import SimpleNamespace

import pytest

from firnline.cli.serve import serve
from firnline.service import serving

HEAVY = ("duckdb", "llvmlite", "numba", "pandas", "pyspark", "scipy")


@pytest.mark.parametrize(
    "modules",
    [
        ("firnline.service.app",),
        ("firnline.history.edits.rollback", "firnline.history.edits.sinks", "firnline.history.edits.dead_letters"),
        ("firnline.sources.files.source", "firnline.sinks.delta.sink"),
        ("firnline.sinks.http.sink", "firnline.sinks.postgres.sink", "firnline.sinks.redis.sink"),
        ("firnline.sinks.kafka.sink", "firnline.history.topology.restore"),
    ],
)
def test_what_the_service_does_not_load(modules: tuple[str, ...]) -> None:
    code = f"import sys, {', '.join(modules)}; print(*sorted(set(sys.modules) & set({HEAVY!r})))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == []


def test_the_c_library_is_asked_for_two_pools(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[int, int]] = []
    library = SimpleNamespace(mallopt=lambda option, value: asked.append((option, value)))
    monkeypatch.setattr(ctypes, "CDLL", lambda name: library)
    serving.keep_memory_together()
    assert asked == [(-8, 2)]  # M_ARENA_MAX of malloc.h


def test_a_c_library_without_pools_is_no_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(_: object) -> None:
        raise OSError("no library")

    for library in (refuse, lambda _: SimpleNamespace()):
        monkeypatch.setattr(ctypes, "CDLL", library)
        serving.keep_memory_together()


def test_the_command_asks_before_it_does_anything_else(monkeypatch: pytest.MonkeyPatch) -> None:
    class AskedError(Exception):
        """The C library was asked."""

    def ask() -> None:
        raise AskedError

    monkeypatch.setattr(serving, "leave_out_pandas", lambda: None)
    monkeypatch.setattr(serving, "keep_memory_together", ask)
    with pytest.raises(AskedError):
        serve("no.yml")
