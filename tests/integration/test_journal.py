"""A pipeline that decides in its journal: runs, recovery, fences and history edits, with sinks of several kinds."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import dataclass, replace
from pathlib import Path
from typing import ClassVar

import pytest
from deltalake import DeltaTable

from firnline.errors import DecidingSinkError, StoreAheadError
from firnline.options import Home, PipelineOptions, SinkOptions
from firnline.run.open_pipeline import open_pipeline
from firnline.sinks.delta.options import DeltaSinkOptions, journal_in
from tests.support.pipelines import MakeOptions, checkpoint_of, make_epochs, run_once, run_to_end
from tests.support.samples import SampleInput, table_ids
from tests.support.shelf import register_shelf, shelved


@dataclass(frozen=True, slots=True)
class FollowerOptions(SinkOptions):
    """A shelf that cannot decide."""

    type: ClassVar[str] = "shelf"


@pytest.fixture
def options(make_options: MakeOptions, tmp_path: Path) -> PipelineOptions:
    """One optional table; the journal decides in `home`."""
    table = DeltaSinkOptions("lake", str(tmp_path / "lake"), required=False)
    return make_options(max_files=1, home=tmp_path / "home", sinks=(table,))


def journal(tmp_path: Path) -> DeltaTable:
    return DeltaTable(tmp_path / "home")


def test_a_journal_has_no_rows_and_every_checkpoint_names_it(
    options: PipelineOptions, sample: SampleInput, tmp_path: Path
) -> None:
    make_epochs(sample, options, 3)
    assert table_ids(tmp_path / "lake") == sample.ids
    assert journal(tmp_path).to_pyarrow_table().num_rows == 0
    assert [field.name for field in journal(tmp_path).schema().fields] == ["epoch"]
    identity = {"sink": "journal", "table": str(journal(tmp_path).metadata().id)}
    infos = [json.loads(one["firnline"]) for one in journal(tmp_path).history()]
    assert [one["checkpoint"]["deciding"] for one in infos if "checkpoint" in one] == [identity] * 3
    assert checkpoint_of(options).columns.keys() == {"files"}, "no table has the columns for sure"


def test_rows_are_counted_in_the_first_sink(options: PipelineOptions, sample: SampleInput) -> None:
    sample.add("a.json", 3)
    run = run_once(options)
    assert (run.result.rows, run.told.epochs[0].rows_in, run.told.epochs[0].sink_rows) == (3, "lake", {})


def test_a_sink_that_was_away_gets_its_rows_from_the_home(
    options: PipelineOptions, sample: SampleInput, tmp_path: Path
) -> None:
    make_epochs(sample, options, 1)
    (tmp_path / "lake").rename(tmp_path / "away")
    (tmp_path / "lake").touch()
    make_epochs(sample, options, 2, first=2)
    assert list((tmp_path / "home").rglob("*.parquet")), "the rows wait in the outbox"
    (tmp_path / "lake").unlink()
    (tmp_path / "away").rename(tmp_path / "lake")
    run_to_end(options)
    assert table_ids(tmp_path / "lake") == sample.ids


def test_a_required_sink_that_cannot_decide(
    make_options: MakeOptions, sample: SampleInput, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    register_shelf(monkeypatch)
    table = DeltaSinkOptions("lake", str(tmp_path / "lake"), required=False)
    sinks = (FollowerOptions("shelf"), table)
    options = make_options(max_files=1, home=tmp_path / "home", commit_policy="quorum", quorum=2, sinks=sinks)
    make_epochs(sample, options, 3)
    assert shelved() == table_ids(tmp_path / "lake") == sample.ids


def test_a_quorum_does_not_count_the_journal(
    make_options: MakeOptions, sample: SampleInput, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One sink is away, and the journal does not stand in for it."""
    register_shelf(monkeypatch)
    (tmp_path / "lake").touch()
    table = DeltaSinkOptions("lake", str(tmp_path / "lake"), required=False)
    sinks = (FollowerOptions("shelf", required=False), table)
    two = make_options(max_files=1, home=tmp_path / "home", commit_policy="quorum", quorum=2, sinks=sinks)
    sample.add("a.json", 3)
    assert run_once(two).exit_code != 0
    one = replace(two, batch=replace(two.batch, quorum=1))
    run_to_end(one)
    assert shelved() == sample.ids


def test_a_folder_with_a_table_of_rows_cannot_be_the_home(
    make_options: MakeOptions, sample: SampleInput, tmp_path: Path
) -> None:
    make_epochs(sample, make_options(table=str(tmp_path / "home"), name="other"), 1)
    table = DeltaSinkOptions("lake", str(tmp_path / "lake"), required=False)
    run = run_once(make_options(home=tmp_path / "home", sinks=(table,)))
    assert "is a table with rows of its own, so it cannot be the journal" in str(run.result.error)


def test_another_sink_does_not_decide_after_the_journal(
    options: PipelineOptions, sample: SampleInput, tmp_path: Path
) -> None:
    make_epochs(sample, options, 2)
    table = options.sinks[0]
    decides = replace(options, journal=None, sinks=(replace(table, required=True),))
    with pytest.raises(DecidingSinkError) as refused:
        open_pipeline(decides).load()
    assert "sink 'journal'" in refused.value.message
    assert "required: false" in (refused.value.hint or "")
    run = run_once(replace(options, journal=journal_in(Home(str(tmp_path / "other")))))
    assert isinstance(run.result.error, StoreAheadError)
    assert table_ids(tmp_path / "lake") == sample.ids == Counter(sample.ids)
