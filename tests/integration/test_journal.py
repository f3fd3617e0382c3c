"""A pipeline that decides in its journal: runs, recovery, fences and history edits, with sinks of several kinds."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import dataclass, replace
from pathlib import Path
from typing import ClassVar

import pytest
from deltalake import DeltaTable

from firnline.cli.dry_run_preview import preview
from firnline.errors import DecidingSinkError, FencedError, RollbackRefusedError, StoreAheadError
from firnline.history.checkpoints import load_checkpoints
from firnline.history.edits.fresh_start import start_over
from firnline.history.edits.ledger_repair import LedgerRepair
from firnline.history.edits.operator_state import Rescale
from firnline.history.edits.restore import restore_savepoint
from firnline.history.edits.rollback import Rollback
from firnline.history.savepoints.create import create_savepoint
from firnline.history.status import load_status
from firnline.maintenance.gc import gc, vacuum
from firnline.maintenance.state import sweep_state
from firnline.options import Home, PipelineOptions, SinkOptions
from firnline.run.open_pipeline import open_pipeline
from firnline.sinks.delta.options import DeltaSinkOptions, journal_in
from tests.support.damage import ledger_files
from tests.support.keyed import KeyedInput, answers, answers_without_trouble, keyed_options, run_epochs
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
    assert [field.name for field in journal(tmp_path).schema().fields] == ["_firnline_journal"]
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


# -- history ------------------------------------------------------------------------------------------


def test_a_rollback_takes_back_what_the_journal_decided(
    options: PipelineOptions, sample: SampleInput, tmp_path: Path
) -> None:
    make_epochs(sample, options, 1)
    before = Counter(sample.ids)
    make_epochs(sample, options, 2, first=2)
    plan, receipt = Rollback(open_pipeline(options), 1).perform("test")
    assert (receipt.epoch, [sink.rows_removed for sink in plan.sinks]) == (4, [0, 6])
    assert table_ids(tmp_path / "lake") == before
    run_to_end(options)
    assert table_ids(tmp_path / "lake") == sample.ids
    assert journal(tmp_path).to_pyarrow_table().num_rows == 0


def test_a_rollback_outlives_the_log_of_the_journal(
    options: PipelineOptions, sample: SampleInput, tmp_path: Path
) -> None:
    """The journal has no rows to bring back, so it needs no old version."""
    make_epochs(sample, options, 3)
    journal(tmp_path).create_checkpoint()
    for version in range(journal(tmp_path).version()):
        (tmp_path / "home" / "_delta_log" / f"{version:020d}.json").unlink()
    Rollback(open_pipeline(options), 1).perform("test")
    assert sum(table_ids(tmp_path / "lake").values()) == 3
    run_to_end(options)
    assert table_ids(tmp_path / "lake") == sample.ids


def test_a_sink_that_cannot_go_back_is_left_by_name(
    make_options: MakeOptions, sample: SampleInput, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    register_shelf(monkeypatch)
    options = make_options(max_files=1, home=tmp_path / "home", sinks=(FollowerOptions("shelf"),))
    make_epochs(sample, options, 2)
    with pytest.raises(RollbackRefusedError, match="shelf cannot take rows back") as refused:
        Rollback(open_pipeline(options), 1).perform("test")
    assert "--leave shelf" in (refused.value.hint or "")
    Rollback(open_pipeline(options), 1, leave=["shelf"]).perform("test")
    run_to_end(options)
    assert sum(shelved().values()) == 9, "the rows that were undone are written again"


@pytest.mark.parametrize("truncate", [False, True])
def test_a_fresh_start(options: PipelineOptions, sample: SampleInput, tmp_path: Path, truncate: bool) -> None:
    make_epochs(sample, options, 2)
    start_over(open_pipeline(options), 2, "test", truncate=truncate)
    run_to_end(options)
    times = 1 if truncate else 2
    assert table_ids(tmp_path / "lake") == Counter(dict.fromkeys(sample.ids, times))


@pytest.mark.parametrize("place", ["same", "new"])
def test_a_savepoint_comes_back(
    options: PipelineOptions, make_options: MakeOptions, sample: SampleInput, tmp_path: Path, place: str
) -> None:
    make_epochs(sample, options, 2)
    before = Counter(sample.ids)
    create_savepoint(open_pipeline(options), str(tmp_path / "saved"), copy=True, run="test")
    make_epochs(sample, options, 1, first=3)
    target, lake = options, tmp_path / "lake"
    if place == "new":
        lake = tmp_path / "new" / "lake"
        table = DeltaSinkOptions("lake", str(lake), required=False)
        target = make_options(max_files=1, home=tmp_path / "new" / "home", sinks=(table,))
    restore_savepoint(open_pipeline(target), str(tmp_path / "saved"), "test")
    assert table_ids(lake) == before
    run_to_end(target)
    assert table_ids(lake) == sample.ids


def test_commands_that_look(options: PipelineOptions, sample: SampleInput, tmp_path: Path) -> None:
    found = preview(open_pipeline(options))
    assert found["journal"] == {
        "table": str(tmp_path / "home"), "exists": False, "version": None, "writable": True
    }  # fmt: skip
    make_epochs(sample, options, 2)
    status = load_status(open_pipeline(options))
    assert (status.rows, status.rows_in, status.table) == (6, "lake", str(tmp_path / "home"))
    assert [(sink["name"], sink["epoch"]) for sink in status.sinks] == [("journal", 2), ("lake", 2)]
    assert [row["rows"] for row in load_checkpoints(open_pipeline(options), None).checkpoints] == [3, 3]
    found = preview(open_pipeline(options))
    assert [sink["name"] for sink in found["sinks"]] == ["lake"]
    assert {column["origin"] for column in found["schema"]} == {"table"}
    assert found["journal"]["exists"]


def test_sweeps_leave_what_others_keep_in_the_home(
    options: PipelineOptions, sample: SampleInput, tmp_path: Path
) -> None:
    make_epochs(sample, options, 3)
    others = tmp_path / "home" / "mine" / "rows.parquet"
    others.parent.mkdir()
    others.write_bytes(b"rows of somebody else")
    for _ in range(2):
        gc(str(tmp_path / "home"), grace_seconds=0)
        vacuum(str(tmp_path / "home"))
    assert others.exists()
    make_epochs(sample, options, 1, first=4)
    assert table_ids(tmp_path / "lake") == sample.ids


def test_an_older_run_is_fenced_by_the_journal(options: PipelineOptions, sample: SampleInput) -> None:
    make_epochs(sample, options, 1)
    old, new = open_pipeline(options).deciding, open_pipeline(options).deciding
    generation = old.claim("old").generation
    assert new.claim("new").generation == generation + 1
    with pytest.raises(FencedError):
        old.check_holder(generation)
    with pytest.raises(FencedError):
        old.claim("old", again=True)


def test_two_runs_create_the_journal_at_once(options: PipelineOptions) -> None:
    one, two = open_pipeline(options).deciding, open_pipeline(options).deciding
    assert not one.load().exists
    assert not two.load().exists
    assert (one.claim("one").generation, two.claim("two").generation) == (1, 2)
    assert one.identity == two.identity


def test_a_lost_ledger_entry_is_repaired(options: PipelineOptions, sample: SampleInput, tmp_path: Path) -> None:
    make_epochs(sample, options, 3)
    ledger_files(tmp_path / "home", options.name)[1].unlink()
    LedgerRepair(open_pipeline(options), processed=["*"]).perform("test", lambda _: None)
    make_epochs(sample, options, 1, first=4)
    assert table_ids(tmp_path / "lake") == sample.ids


def test_state_lies_in_the_home_and_is_rescaled(tmp_path: Path) -> None:
    table = DeltaSinkOptions("lake", str(tmp_path / "lake"), required=False, input="totals", write="upsert")
    home, keyed = tmp_path / "home", KeyedInput(tmp_path / "in")
    options = keyed_options(tmp_path, shards=None, home=home, sinks=(table,), commit_policy="quorum", quorum=1)
    run_epochs(keyed, options, 3)
    assert list(home.rglob("*.arrow")), "the state is in the home"
    _, receipt = Rescale(open_pipeline(options), 5).perform("test")
    assert receipt is not None
    run_epochs(keyed, options, 2)
    assert {int(ref["shards"]) for ref in checkpoint_of(options).state.values()} == {5}
    untroubled = replace(options, journal=journal_in(Home(str(tmp_path / "other"))))
    expected = answers_without_trouble(tmp_path, untroubled)
    assert answers(tmp_path / "lake") == expected
    sweep_state(open_pipeline(options), grace_seconds=0, dry_run=False)
    Rollback(open_pipeline(options), 5).perform("test")
    run_to_end(options)
    assert answers(tmp_path / "lake") == expected
