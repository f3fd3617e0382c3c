"""OpenPipeline that are gone: never a fresh start over history, never a commit of files that are not there."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from deltalake import DeltaTable

from firnline.sinks.delta.options import DeltaSinkOptions
from firnline.sources.base import Limits
from firnline.sources.files import planning
from firnline.sources.files.position import FileState
from firnline.sources.files.source import FileSource
from firnline.sources.known import KnownFiles
from tests.support.pipelines import MakeOptions, file_source, run_once
from tests.support.samples import SampleInput, table_ids


@pytest.fixture
def filled(sample: SampleInput) -> SampleInput:
    for number in range(5):
        sample.add(f"a{number}.json", 4)
    return sample


def test_a_table_made_anew_over_a_ledger_with_history_is_refused(
    filled: SampleInput, make_options: MakeOptions, tmp_path: Path
) -> None:
    options = make_options(max_files=1)
    assert run_once(options).exit_code == 0
    schema = DeltaTable(str(tmp_path / "out")).schema()
    shutil.rmtree(tmp_path / "out" / "_delta_log")
    DeltaTable.create(str(tmp_path / "out"), schema)
    run = run_once(options)
    assert run.result.error is not None
    assert (run.exit_code, run.result.error.code) == (1, "checkpoint-lost")
    assert DeltaTable(str(tmp_path / "out")).file_uris() == []


def test_a_sink_whose_staged_files_are_gone_is_not_given_them(
    filled: SampleInput, make_options: MakeOptions, tmp_path: Path
) -> None:
    second = tmp_path / "second"
    sinks = [DeltaSinkOptions(name="a", table=str(tmp_path / "out")), DeltaSinkOptions(name="b", table=str(second))]
    options = make_options(sinks=sinks, max_files=1)
    assert run_once(options).exit_code == 0
    shutil.rmtree(second)
    filled.add("b.json", 4)
    run = run_once(options)
    assert run.exit_code == 1
    assert not DeltaTable.is_deltatable(str(second)) or DeltaTable(str(second)).file_uris() == []
    assert table_ids(tmp_path / "out")[0] <= 1


def test_a_file_that_was_late_to_a_lost_epoch_waits_for_its_turn(tmp_path: Path, make_options: MakeOptions) -> None:
    """Late is relative to a base: after the mark of another base the same file is simply not read yet."""
    folder = tmp_path / "in"
    folder.mkdir()
    for number in range(6):
        (folder / f"f{number:02}.json").write_text("{}\n")
    source = FileSource(file_source(make_options()), once=True)
    ahead = FileState(str(folder), mark=str(folder / "f05.json"))
    known = KnownFiles((str(folder / f"f{n:02}.json"), "") for n in range(5))
    assert [s.name for s in source.reconcile(ahead.to_json(), known).late] == [str(folder / "f05.json")]
    limits = Limits(3, 1 << 30, 1000, 60_000, 10, 1)
    behind = FileState(str(folder), mark=str(folder / "f00.json"))
    plan = source.plan(behind.to_json(), limits)
    assert plan is not None
    names = [Path(item["path"]).name for split in plan.splits for item in split.inputs]
    assert names == ["f01.json", "f02.json", "f03.json"]
    ended = [{"path": str(folder / n), "to": 1, "offset": 3, "line": 1, "finished": True} for n in names]
    after, _ = planning.advance(behind, plan.splits, ended, 3, 1)
    assert after.mark == str(folder / "f03.json")
