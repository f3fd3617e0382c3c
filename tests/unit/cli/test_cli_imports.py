"""Commands that only look stay quick: what they must not import, checked in fresh processes."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

HEAVY = ("pyspark", "py4j", "numba", "firnline.ndjson", "duckdb", "pandas", "prometheus_client", "obstore")
LIGHTEST = (*HEAVY, "pyarrow", "deltalake", "pydantic", "numpy")


def imported(tokens: list[str], cwd: Path, watched: tuple[str, ...]) -> tuple[int, list[str]]:
    """Run a command in a fresh process; its exit code, and which of the watched modules it imported."""
    code = (
        "import sys\n"
        "from firnline.cli.main import run_command\n"
        f"code = run_command({tokens!r})\n"
        f"print('IMPORTED', code, *[m for m in {watched!r} if m in sys.modules])\n"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=cwd, capture_output=True, text=True, check=True)
    _, exit_code, *found = done.stdout.splitlines()[-1].split()
    return int(exit_code), found


@pytest.mark.parametrize("verb", ["status", "checkpoints", "files", "quarantine"])
def test_looking_imports_nothing_heavy(finished: Path, verb: str) -> None:
    assert imported([verb], finished.parent, HEAVY) == (0, [])


@pytest.mark.parametrize("verb", ["create", "list"])
def test_savepoints_need_no_jvm(finished: Path, verb: str) -> None:
    watched = tuple(module for module in HEAVY if module != "pandas")  # pyarrow asks for it when it takes a table over
    assert imported(["savepoint", verb], finished.parent, watched) == (0, [])


def test_help_imports_next_to_nothing(tmp_path: Path) -> None:
    assert imported(["--help"], tmp_path, LIGHTEST) == (0, [])


def test_a_wrong_spec_is_answered_before_anything_heavy_is_imported(spec: Path) -> None:
    spec.write_text("name: x\n")
    for verb in ("run", "dry-run", "status"):
        assert imported([verb], spec.parent, (*HEAVY, "deltalake")) == (2, [])
