"""What the service loads: nothing that only runs need. A compiler, data frames and a database take 130 MB."""

from __future__ import annotations

import subprocess
import sys

import pytest

HEAVY = ("duckdb", "llvmlite", "numba", "pandas", "pyspark", "scipy")


@pytest.mark.parametrize(
    "modules",
    [
        ("firnline.service.app",),
        ("firnline.history.edits.rollback", "firnline.history.edits.sinks", "firnline.history.edits.dead_letters"),
        ("firnline.sources.files.source", "firnline.sinks.delta.sink"),
        ("firnline.sinks.http.sink", "firnline.sinks.postgres.sink", "firnline.sinks.redis.sink"),
    ],
)
def test_what_the_service_does_not_load(modules: tuple[str, ...]) -> None:
    code = f"import sys, {', '.join(modules)}; print(*sorted(set(sys.modules) & set({HEAVY!r})))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == []
