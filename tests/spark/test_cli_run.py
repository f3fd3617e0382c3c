"""The command as a user runs it, on real Spark, in processes of its own: signals, kills, the demo and the drill."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from tests.support.kills import PROOF
from tests.support.processes import wait_until
from tests.support.samples import SampleInput, table_ids

pytestmark = pytest.mark.spark

SPEC = """\
name: flights
sources:
  flights: {type: files, path: in, poll_interval_secs: 1}
sinks:
  - {type: delta, table: out}
batch: {max_files: 1}
"""
SECONDS = 300


class Command:
    """`firnline` in a session of its own, with its output in files."""

    def __init__(self, folder: Path, *tokens: str) -> None:
        self.folder = folder
        self._out, self._err = folder / "stdout", folder / "stderr"
        with self._out.open("wb") as out, self._err.open("wb") as err:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "firnline.cli", *tokens], cwd=folder, stdout=out, stderr=err,
                stdin=subprocess.DEVNULL, start_new_session=True,
            )  # fmt: skip

    @property
    def out(self) -> str:
        return self._out.read_text()

    @property
    def err(self) -> str:
        return self._err.read_text()

    def wait_for(self, text: str) -> None:
        wait_until(lambda: text in self.err or self.process.poll() is not None)
        assert text in self.err

    def wait(self) -> int:
        try:
            return self.process.wait(SECONDS)
        except subprocess.TimeoutExpired:
            os.killpg(self.process.pid, signal.SIGQUIT)  # the JVM writes its stacks to stdout
            time.sleep(5)
            os.killpg(self.process.pid, signal.SIGKILL)
            raise AssertionError(f"the command hangs:\n{self.err}\n{self.out}") from None

    def is_gone(self) -> bool:
        """Whether nothing of the session is left, the JVM included."""
        try:
            os.killpg(self.process.pid, 0)
        except ProcessLookupError:
            return True
        return False


def run_json(folder: Path, *tokens: str) -> tuple[int, Any]:
    command = Command(folder, *tokens, "--json")
    code = command.wait()
    return code, json.loads(command.out or "null")


@pytest.mark.timeout(900)  # three starts of Spark, on a machine that may be busy
def test_signals_stop_a_run_cleanly_or_at_once_and_nothing_is_lost(tmp_path: Path, sample: SampleInput) -> None:
    for number in range(30):
        sample.add(f"f{number:02d}.json.gz", 50)
    (tmp_path / "firnline.yml").write_text(SPEC)

    first = Command(tmp_path, "run")
    first.wait_for("epoch 2 committed")
    first.process.send_signal(signal.SIGINT)
    assert first.wait() == 0
    assert first.out.startswith("stopped cleanly after epoch ")
    stopped = int(first.out.split()[-1])
    assert 2 <= stopped < 30
    wait_until(first.is_gone)

    second = Command(tmp_path, "run")
    second.wait_for(f"resuming after epoch {stopped}")
    second.wait_for("committed")
    second.process.send_signal(signal.SIGTERM)
    second.process.send_signal(signal.SIGTERM)
    assert second.wait() in (0, 130)  # 0 only where both signals fell into the end of the clean stop
    wait_until(second.is_gone)

    code, found = run_json(tmp_path, "run", "--once")
    assert (code, found["status"], found["epoch"]) == (0, "done", 30)
    assert table_ids(str(tmp_path / "out")) == sample.ids


def test_the_demo_loses_and_doubles_nothing(tmp_path: Path) -> None:
    kills = 2 if PROOF else 1
    code, found = run_json(tmp_path, "demo", "--records", "20000", "--kills", str(kills), "--folder", "demo")
    assert code == 0
    assert (found["records_in"], found["records_out"], found["distinct_ids"]) == (20000, 20000, 20000)
    assert (found["lost"], found["doubled"], found["kills"], len(found["recovery_seconds"])) == (0, 0, kills, kills)
    assert found["checkpoints"] == 20
    from firnline.cli.demo import EPILOGUE

    assert [key for key in found if key not in EPILOGUE] == []


def test_the_drill_compares_every_file_of_ones_own_spec(tmp_path: Path, sample: SampleInput) -> None:
    for number in range(8):
        sample.add(f"f{number}.json", 20, bad=1)
    (tmp_path / "firnline.yml").write_text(SPEC)
    code, found = run_json(tmp_path, "drill", "--table", "scratch", "--kills", "1")
    assert code == 0
    assert (found["lost"], found["doubled"], found["kills"]) == (0, 0, 1)
    assert [(f["lines"], f["rows"], f["quarantined"]) for f in found["files"]] == [(21, 20, 1)] * 8
    assert not (tmp_path / "out").exists()
    from firnline.cli.drill import EPILOGUE

    assert [key for key in (*found, *found["files"][0]) if key not in EPILOGUE] == []
