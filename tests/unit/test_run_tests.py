"""`make test` runs both halves whatever happens, and ends with one summary that a program can read."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from collections import Counter
from pathlib import Path

SCRIPT = Path(__file__).parents[2] / "scripts" / "run_tests.py"
# One test of each half passes; the first half also fails, breaks in a teardown and skips.
TESTS = """
import pytest

@pytest.fixture
def broken():
    yield
    raise OSError("no")

def test_good(): pass
def test_bad(): assert False
def test_torn_down(broken): pass
@pytest.mark.skip
def test_left_out(): pass
@pytest.mark.spark
def test_on_spark(): pass
"""
DYING = """
import os, pytest

@pytest.mark.spark
def test_dies(): os._exit(9)
"""
FINE = """
import pytest

@pytest.mark.spark
def test_fine(): pass
"""
DYING_RUN = """
import os, pytest

@pytest.hookimpl(tryfirst=True)
def pytest_sessionfinish(session):
    if session.config.option.markexpr == "spark" and not hasattr(session.config, "workerinput"):
        os._exit(9)
"""
MARKERS = "[pytest]\nmarkers = spark: on Spark\n"


def test_the_page_gets_the_record_of_the_last_run_and_keeps_the_rest() -> None:
    script = importlib.util.spec_from_file_location("run_tests", SCRIPT)
    assert script is not None
    assert script.loader is not None
    module = importlib.util.module_from_spec(script)
    sys.modules[script.name] = module  # dataclasses look their module up
    script.loader.exec_module(module)
    half = module.Half("without Spark", 7, 1, ["t.py::test_bad"], {"t.py": Counter(kills=1200, states=3)}, 90.0)
    page = module.PAGE.read_text()
    once = module.with_record(page, module.record([half]))
    twice = module.with_record(once, module.record([half]))
    assert once == twice
    assert "| tests | 7 passed, 1 failed, 1 skipped |" in once
    assert "| `t.py` | 1,200 kills, 3 states |" in once
    assert "Failed: `t.py::test_bad`" in once
    assert once.partition(module.BEGIN)[0] == page.partition(module.BEGIN)[0]
    assert once.partition(module.END)[2] == page.partition(module.END)[2]


def run_tests(tmp_path: Path, tests: str) -> subprocess.CompletedProcess[str]:
    (tmp_path / "test_some.py").write_text(tests)
    (tmp_path / "pytest.ini").write_text(MARKERS)
    command = [sys.executable, str(SCRIPT), "-p", "no:cacheprovider", str(tmp_path / "test_some.py")]
    environment = {**os.environ, "FIRNLINE_TEST_WORKERS": "1"}
    return subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True)


def test_a_failure_in_the_first_half_does_not_stop_the_second(tmp_path: Path) -> None:
    done = run_tests(tmp_path, TESTS)
    lines = done.stdout.splitlines()
    assert done.returncode == 1
    assert lines[-1] == "2 passed, 2 failed"
    assert lines[-3:-1] == ["FAILED test_some.py::test_bad", "FAILED test_some.py::test_torn_down"]
    assert lines[-5].startswith("without Spark: 1 passed, 2 failed, 1 skipped in ")
    assert lines[-4].startswith("with Spark: 1 passed, 0 failed in ")


def test_a_test_that_takes_its_process_along_has_failed(tmp_path: Path) -> None:
    done = run_tests(tmp_path, DYING)
    assert done.returncode == 1
    assert done.stdout.splitlines()[-2:] == ["FAILED test_some.py::test_dies", "0 passed, 1 failed"]


def test_a_half_that_does_not_come_to_its_end_has_failed(tmp_path: Path) -> None:
    (tmp_path / "conftest.py").write_text(DYING_RUN)
    done = run_tests(tmp_path, FINE)
    assert done.returncode == 1
    assert done.stdout.splitlines()[-2:] == ["FAILED the tests with Spark ended with exit code 9", "0 passed, 1 failed"]
