"""Every call to storage, failed once, failed for ever, and performed with its answer lost."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from firnline.options import PipelineOptions
from firnline.testing.faults import ERRORS, Faults, faulty_storage
from tests.support.pipelines import LocalRun, MakeOptions, check_arrived, run_once
from tests.support.samples import SampleInput

pytestmark = pytest.mark.crash

STRIDE = 1 if os.environ.get("FIRNLINE_PROOF") else 5


@pytest.fixture(autouse=True)
def _short_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("firnline.sources.files.reader.READ_BACKOFF_SECS", 0.001)


@pytest.fixture
def options(sample: SampleInput, make_options: MakeOptions) -> PipelineOptions:
    sample.add("a1.json.gz", 6, bad=1)
    sample.add("a2.json", 9)
    sample.add("b1.json", 6, extra={"deep": 1})
    return make_options(max_files=2, max_events=8, partition_by=("month",), max_inflight=1)


def start_over(options: PipelineOptions, kept: Path | None) -> None:
    table = Path(options.sinks[0].location)
    shutil.rmtree(table, ignore_errors=True)
    if kept is not None:
        shutil.copytree(kept, table)


def sweep(options: PipelineOptions, sample: SampleInput, kept: Path | None, **how: Any) -> Iterator[LocalRun]:
    """Fail call after call of one run; after each, a clean run must put everything right."""
    start_over(options, kept)
    with faulty_storage(Faults()) as counted:
        assert run_once(options).exit_code == 0
    assert len(counted.calls) > 20
    errors = sorted(ERRORS)
    for nth in range(1, len(counted.calls) + 1, STRIDE):
        start_over(options, kept)
        with faulty_storage(Faults(nth, errors[nth % len(errors)], **how)):
            run = run_once(options)
        assert run.exit_code in (0, 3, 4), (nth, counted.calls[nth - 1], run.result)
        if not how.get("for_ever"):
            assert run.exit_code == 0, (nth, counted.calls[nth - 1], run.result)
        elif run.exit_code:
            assert run.result.error is not None
        assert run_once(options).exit_code == 0
        check_arrived(sample, options)
        yield run


@pytest.mark.parametrize("how", [{}, {"after": True}, {"for_ever": True}], ids=["once", "answer-lost", "for-ever"])
def test_first_run(options: PipelineOptions, sample: SampleInput, how: dict[str, bool]) -> None:
    for _ in sweep(options, sample, None, **how):
        pass


@pytest.mark.parametrize("how", [{}, {"after": True}, {"for_ever": True}], ids=["once", "answer-lost", "for-ever"])
def test_recovery(options: PipelineOptions, sample: SampleInput, tmp_path: Path, how: dict[str, bool]) -> None:
    assert run_once(options).exit_code == 0
    kept = tmp_path / "kept"
    shutil.copytree(options.sinks[0].location, kept)
    sample.add("a0.json", 3)  # late
    sample.add("c1.json.gz", 3)
    for _ in sweep(options, sample, kept, **how):
        pass
