"""A real disk that fills up: a clear error, exit code 3, and after freeing space everything is there once."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from firnline.options import PipelineOptions
from tests.support.pipelines import MakeOptions, run_once
from tests.support.processes import wait_until
from tests.support.samples import SampleInput, quarantined, table_ids

pytestmark = pytest.mark.crash

SIZE = 1024 * 1024


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    folder = tmp_path / "disk"
    folder.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={SIZE}", "tmpfs", str(folder)], capture_output=True)
    if mounted.returncode:
        pytest.skip(f"cannot mount a tmpfs here: {mounted.stderr.decode().strip()}")
    yield folder
    subprocess.run(["umount", "-l", str(folder)], check=True)


def fill(disk: Path, free: int) -> Path:
    """Leave only so many bytes free."""
    stat = os.statvfs(disk)
    ballast = disk / "ballast"
    ballast.write_bytes(b"x" * max(0, stat.f_bavail * stat.f_frsize - free))
    return ballast


@pytest.mark.parametrize("free_kb", [0, 4, 8, 12, 16, 20, 24, 28, 32, 40, 48, 56, 64, 80, 96, 128])
def test_full_disk(sample: SampleInput, make_options: MakeOptions, small_disk: Path, free_kb: int) -> None:
    options: PipelineOptions = make_options(table=str(small_disk / "out"), max_files=2, attempts=1)
    sample.add("a1.json", 30, bad=3)
    assert run_once(options).exit_code == 0
    for number in range(8):
        sample.add(f"b{number}.json.gz", 30, bad=3, extra={"wide": "y" * 50})
    ballast = fill(small_disk, free_kb * 1024)
    run = run_once(options)
    assert run.exit_code in (0, 3), run.result
    if free_kb < 48:
        assert run.exit_code == 3
    if run.exit_code:
        assert run.result.error is not None
        assert "o space left on device" in run.result.error.message
    # A run that fails does not wait for a thread that writes its history.
    wait_until(lambda: not list(small_disk.rglob("*.tmp")), seconds=60)
    before = table_ids(options.sinks[0].location)
    assert before <= sample.ids  # nothing doubled, whole epochs only
    ballast.unlink()
    assert run_once(options).exit_code == 0
    assert table_ids(options.sinks[0].location) == sample.ids
    assert quarantined(options.sinks[0].location, options.name) == sample.bad


def test_first_run_on_a_full_disk(sample: SampleInput, make_options: MakeOptions, small_disk: Path) -> None:
    options: PipelineOptions = make_options(table=str(small_disk / "out"), attempts=1)
    sample.add("a1.json", 30)
    ballast = fill(small_disk, 0)
    run = run_once(options)
    assert run.exit_code == 3, run.result
    assert run.result.error is not None
    assert "o space left on device" in run.result.error.message
    ballast.unlink()
    assert run_once(options).exit_code == 0
    assert table_ids(options.sinks[0].location) == sample.ids
