"""Further sinks in a rollback or a fresh start: staged ones, lagging ones, new ones, unreachable ones, strangers."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from deltalake import DeltaTable, write_deltalake

from firnline.committer.committer import CycleReport
from firnline.errors import RollbackRefusedError
from firnline.history.edits.fresh_start import start_over
from firnline.history.edits.rollback import Rollback, RollbackPlan
from firnline.options import PipelineOptions
from firnline.run import edits, joining
from firnline.run.open_pipeline import open_pipeline
from firnline.sinks.delta.options import DeltaSinkOptions
from tests.support.committers import commit_table, pending_units, rejected_reasons
from tests.support.pipelines import MakeOptions, make_epochs, run_once, run_to_end
from tests.support.samples import SampleInput, table_ids


def roll_back(options: PipelineOptions, to: int, **settings: Any) -> RollbackPlan:
    return Rollback(open_pipeline(options), to, **settings).perform("test")[0]


def rows(table: str) -> int:
    return sum(table_ids(table).values())


@pytest.fixture
def sinks(tmp_path: Path) -> tuple[DeltaSinkOptions, DeltaSinkOptions]:
    return DeltaSinkOptions("main", str(tmp_path / "one")), DeltaSinkOptions("copy", str(tmp_path / "two"))


@contextmanager
def outage(table: str) -> Iterator[None]:
    """The table's log cannot be read."""
    log, away = Path(table) / "_delta_log", Path(table) / "_away"
    os.rename(log, away)
    log.write_text("an outage")
    yield
    log.unlink()
    os.rename(away, log)


@contextmanager
def dies_after_the_decision(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    original: Any = joining.settle_edits
    decided: list[bool] = []

    def decide(*arguments: Any) -> Any:
        decided.append(True)
        return decide_first(*arguments)

    def die(*arguments: Any) -> Any:
        if decided:
            raise KeyboardInterrupt
        return original(*arguments)

    decide_first = edits.decide_edit
    with monkeypatch.context() as patch:
        patch.setattr(edits, "settle_edits", die)
        patch.setattr(edits, "decide_edit", decide)
        with pytest.raises(KeyboardInterrupt):
            yield


# -- staged ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("to", [2, 3])
def test_a_staged_sink_drops_the_units_that_are_undone(
    sample: SampleInput, make_options: MakeOptions, tmp_path: Path, to: int
) -> None:
    """Its log is at 2, units 3 to 5 are pending."""
    copy = DeltaSinkOptions("copy", str(tmp_path / "two"), mode="staged", max_pending_units=3)
    main = DeltaSinkOptions("main", str(tmp_path / "one"))
    options = make_options(max_files=1, sinks=(main, copy))
    unlimited = make_options(max_files=1, sinks=(main, DeltaSinkOptions("copy", copy.table, mode="staged")))
    make_epochs(sample, unlimited, 2)
    commit_table(copy.table)
    make_epochs(sample, unlimited, 3, first=3)
    roll_back(options, to)
    report = commit_table(copy.table)
    assert not report.alarms
    run_to_end(options)
    commit_table(copy.table)
    run_to_end(options)
    report = commit_table(copy.table)
    assert not report.alarms
    assert pending_units(copy.table) == []
    assert table_ids(main.table) == sample.ids
    assert table_ids(copy.table) == sample.ids


def test_a_committer_at_work_does_not_look_like_a_fence(
    sample: SampleInput, make_options: MakeOptions, monkeypatch: pytest.MonkeyPatch
) -> None:
    options = make_options(max_files=1, mode="staged")
    make_epochs(sample, options, 2)
    commit_table(options.deciding.location)
    make_epochs(sample, options, 1, first=3)
    commit_table(options.deciding.location)
    make_epochs(sample, options, 2, first=4)
    pipeline = open_pipeline(options)
    original = pipeline.ledger.stage
    cycles: list[CycleReport] = []

    def committing(entry: Any) -> Any:
        if not cycles:
            cycles.append(commit_table(options.deciding.location))
        return original(entry)

    monkeypatch.setattr(pipeline.ledger, "stage", committing)
    plan, receipt = Rollback(pipeline, 2).perform("test")
    assert cycles[0].units == 2, "the committer came between the look and the commit"
    assert (plan.pending_units, receipt.epoch) == (0, 6)
    assert rows(options.deciding.location) == 6
    run_to_end(options)
    commit_table(options.deciding.location)
    assert table_ids(options.deciding.location) == sample.ids


def test_units_left_by_a_kill_are_set_aside_not_committed(
    sample: SampleInput, make_options: MakeOptions, monkeypatch: pytest.MonkeyPatch
) -> None:
    options = make_options(max_files=1, mode="staged")
    make_epochs(sample, options, 2)
    commit_table(options.deciding.location)
    make_epochs(sample, options, 1, first=3)
    with monkeypatch.context() as patch:
        patch.setattr("firnline.sinks.staged.sink.drop_pending", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt()))
        with pytest.raises(KeyboardInterrupt):
            start_over(open_pipeline(options), 3, "test", truncate=True)
    assert not commit_table(options.deciding.location).alarms
    assert next(iter(rejected_reasons(options.deciding.location).values())).startswith("fork")
    run_to_end(options)
    commit_table(options.deciding.location)
    assert table_ids(options.deciding.location) == sample.ids


# -- new, lagging, unreachable --------------------------------------------------------------------------


def test_a_sink_that_was_added_is_refused_before_and_after_a_rollback_which_does_not_touch_it(
    sample: SampleInput, make_options: MakeOptions, sinks: Any
) -> None:
    main, copy = sinks
    make_epochs(sample, make_options(max_files=1, sinks=(main,)), 4)
    options = make_options(max_files=1, sinks=(main, copy))
    assert run_once(options).exit_code == 2
    roll_back(options, 2)
    assert run_once(options).exit_code == 2
    assert not Path(copy.table).exists()
    run_to_end(make_options(max_files=1, sinks=(main,)))
    assert table_ids(main.table) == sample.ids


def test_a_fresh_start_takes_a_new_sink_in_also_after_a_crash(
    sample: SampleInput, make_options: MakeOptions, sinks: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    main, copy = sinks
    make_epochs(sample, make_options(max_files=1, sinks=(main,)), 2)
    options = make_options(max_files=1, sinks=(main, copy))
    with dies_after_the_decision(monkeypatch):
        start_over(open_pipeline(options), 2, "test", truncate=True)
    assert start_over(open_pipeline(options), 2, "test", truncate=True).already
    run_to_end(options)
    assert table_ids(main.table) == sample.ids
    assert table_ids(copy.table) == sample.ids


def lagging(sample: SampleInput, make_options: MakeOptions, tmp_path: Path) -> PipelineOptions:
    """`copy` is optional, is at epoch 1 and is out of reach; `main` is at 4."""
    sinks = (
        DeltaSinkOptions("main", str(tmp_path / "one")),
        DeltaSinkOptions("copy", str(tmp_path / "two"), required=False),
    )
    return make_options(max_files=1, sinks=sinks, commit_policy="required")


def test_refused_when_files_that_a_lagging_sink_is_owed_are_gone(
    sample: SampleInput, make_options: MakeOptions, tmp_path: Path
) -> None:
    options = lagging(sample, make_options, tmp_path)
    make_epochs(sample, options, 1)
    main, copy = (sink.location for sink in options.sinks)
    with outage(copy):
        for number in range(2, 5):
            sample.add(f"f{number:03d}.json", 3)
        run_once(options)
    waiting = list((Path(main) / "_firnline" / options.name / "outbox").rglob("*.parquet"))
    assert len(waiting) == 3
    for path in waiting:
        path.unlink()
    with pytest.raises(RollbackRefusedError, match="staged for it, is gone"):
        roll_back(options, 3)
    assert rows(copy) == 3, "still readable"


def test_a_left_sink_may_be_out_of_reach(sample: SampleInput, make_options: MakeOptions, tmp_path: Path) -> None:
    options = lagging(sample, make_options, tmp_path)
    make_epochs(sample, options, 3)
    main, copy = (sink.location for sink in options.sinks)
    with outage(copy):
        with pytest.raises(RollbackRefusedError, match="copy cannot be read") as caught:
            roll_back(options, 1)
        assert "--leave copy" in caught.value.hint
        roll_back(options, 1, leave=["copy"])
        assert rows(main) == 3
    run_to_end(options)
    assert table_ids(main) == sample.ids
    assert rows(copy) == 9 + 6, "left as it was, and given the rows again"


# -- strangers ------------------------------------------------------------------------------------------


def test_a_strangers_rows_in_a_further_sink_are_not_lost_by_a_rollback_that_is_finished_later(
    sample: SampleInput, make_options: MakeOptions, sinks: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    options = make_options(max_files=1, sinks=sinks)
    make_epochs(sample, options, 3)
    with dies_after_the_decision(monkeypatch):
        roll_back(options, 2)
    copy = options.sinks[1].location
    write_deltalake(copy, pa.table({"id": [-1], "month": ["2026-01"], "v": [0.5]}), mode="append")
    run = run_once(options)
    assert run.error_code == "rollback-refused", run.result
    assert table_ids(copy)[-1] == 1
    assert run.result.error is not None
    assert "firnline rollback --to 2 --leave copy" in run.result.error.hint
    roll_back(options, 2, leave=["copy"])
    run_to_end(options)
    assert table_ids(options.sinks[0].location) == sample.ids
    assert table_ids(copy)[-1] == 1


def test_a_strangers_rows_that_come_between_look_and_commit_are_seen(
    sample: SampleInput, make_options: MakeOptions, monkeypatch: pytest.MonkeyPatch
) -> None:
    options = make_options(max_files=1)
    make_epochs(sample, options, 3)
    pipeline = open_pipeline(options)
    original = pipeline.ledger.stage

    def write_first(entry: Any) -> Any:
        write_deltalake(
            options.deciding.location, pa.table({"id": [-1], "month": ["2026-01"], "v": [0.5]}), mode="append"
        )
        return original(entry)

    monkeypatch.setattr(pipeline.ledger, "stage", write_first)
    with pytest.raises(RollbackRefusedError, match="others changed rows since"):
        Rollback(pipeline, 2).perform("test")
    assert table_ids(options.deciding.location)[-1] == 1
    assert rows(options.deciding.location) == 10


def test_an_append_only_table_is_refused(sample: SampleInput, make_options: MakeOptions) -> None:
    options = make_options(max_files=1)
    make_epochs(sample, options, 2)
    DeltaTable(options.deciding.location).alter.set_table_properties({"delta.appendOnly": "true"})
    with pytest.raises(RollbackRefusedError, match="append-only"):
        roll_back(options, 1)
