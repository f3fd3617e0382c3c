"""Sweeps against whoever names files again: one of them stands still at a chosen step, the other does all its work."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import duckdb
import pytest
from deltalake import DeltaTable

import firnline.maintenance.log_names
import firnline.maintenance.references
import firnline.sinks.delta.sweeps
import firnline.sinks.delta.table
import firnline.storage
from firnline.errors import CheckpointError, RollbackRefusedError, SinkError
from firnline.history.edits.restore import restore_savepoint
from firnline.history.edits.rollback import Rollback
from firnline.history.savepoints.catalog import dispose_savepoint
from firnline.history.savepoints.create import create_savepoint
from firnline.maintenance import compact as compacting
from firnline.maintenance.compact import compact
from firnline.maintenance.gc import gc, vacuum
from firnline.options import PipelineOptions
from firnline.process import Process
from firnline.run.open_pipeline import open_pipeline
from firnline.sinks.delta.sink import DeltaSink
from firnline.sinks.delta.sweeps import SweepLog
from firnline.sinks.delta.table import Table
from firnline.sinks.staged.unit import reject, retry
from firnline.storage import open_storage
from tests.support.committers import commit_table
from tests.support.pipelines import MakeOptions, make_epochs, run_to_end
from tests.support.samples import SampleInput, table_ids

Sweep = Callable[[Path], object]


def sweep_gc(root: Path) -> object:
    return gc(str(root), grace_seconds=0)


def sweep_vacuum(root: Path) -> object:
    return vacuum(str(root), retention_hours=0, allow_short_retention=True)


SWEEPS = pytest.mark.parametrize("sweep", [sweep_gc, sweep_vacuum], ids=["gc", "vacuum"])


class At:
    """Does something when a fault point is reached for the first time: the process stands still there meanwhile."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self._actions: dict[str, Callable[[], None]] = {}
        for module in (firnline.sinks.delta.sweeps, firnline.sinks.delta.table, firnline.storage):
            monkeypatch.setattr(module, "fault_point", self._reached)

    def do(self, point: str, action: Callable[[], object]) -> list[object]:
        """Returns what the action returned or raised, once it has run."""
        found: list[object] = []

        def perform() -> None:
            try:
                found.append(action())
            except (CheckpointError, SinkError) as error:
                found.append(error)

        self._actions[point] = perform
        return found

    def _reached(self, point: str) -> None:
        action = self._actions.pop(point, None)
        if action is not None:
            action()


@pytest.fixture
def at(monkeypatch: pytest.MonkeyPatch) -> At:
    # Stands for tombstones that are older than the table's retention.
    monkeypatch.setattr(
        firnline.maintenance.log_names, "DEFAULT_RETENTION", -firnline.maintenance.log_names.DEFAULT_RETENTION
    )
    return At(monkeypatch)


@pytest.fixture
def options(sample: SampleInput, make_options: MakeOptions) -> PipelineOptions:
    """Four epochs, compacted: the files of every earlier version are removed ones."""
    options = make_options(max_files=1)
    make_epochs(sample, options, 4)
    compact(options.sinks[0].location)
    return options


@pytest.fixture
def root(options: PipelineOptions) -> Path:
    return Path(options.sinks[0].location)


def rows(root: Path) -> int:
    """As DuckDB counts what the log names; it fails where a file is gone."""
    files = [str(path) for path in DeltaTable(root).file_uris()]
    found = duckdb.sql(f"select count(*) from read_parquet({files!r})").fetchone()
    assert found is not None
    return int(found[0])


def roll_back(options: PipelineOptions, to: int = 2) -> Callable[[], object]:
    return lambda: Rollback(open_pipeline(options), to).perform("f" * 16)


def check_goes_on(options: PipelineOptions, sample: SampleInput) -> None:
    run_to_end(options)
    assert table_ids(options.sinks[0].location) == sample.ids


@SWEEPS
def test_a_rollback_does_not_take_back_what_a_sweep_is_about_to_delete(
    at: At, options: PipelineOptions, root: Path, sample: SampleInput, sweep: Sweep
) -> None:
    found = at.do("delta.sweep.after", roll_back(options))
    sweep(root)
    assert isinstance(found[0], RollbackRefusedError)
    assert "being deleted by" in found[0].message
    assert "firnline gc" in str(found[0].hint)
    assert rows(root) == 12
    assert not list((root / "_firnline/sweeps").iterdir())
    check_goes_on(options, sample)


@SWEEPS
def test_a_sweep_lets_go_of_what_a_rollback_took_back_before_it_declared(
    at: At, options: PipelineOptions, root: Path, sample: SampleInput, sweep: Sweep
) -> None:
    found = at.do("delta.sweep.before", roll_back(options))
    sweep(root)
    assert isinstance(found[0], tuple)
    assert rows(root) == 6
    check_goes_on(options, sample)


@SWEEPS
@pytest.mark.parametrize("point", ["delta.claim.before", "delta.jump.before"])
def test_what_a_rollback_needs_is_pinned_from_its_first_look_on(
    at: At, options: PipelineOptions, root: Path, sample: SampleInput, sweep: Sweep, point: str
) -> None:
    at.do(point, lambda: sweep(root))
    Rollback(open_pipeline(options), 2).perform("f" * 16)
    assert rows(root) == 6
    check_goes_on(options, sample)


@SWEEPS
def test_a_rollback_without_pins_is_refused_rather_than_wrong(
    at: At, options: PipelineOptions, root: Path, sample: SampleInput, monkeypatch: pytest.MonkeyPatch, sweep: Sweep
) -> None:
    """As if its pin had been taken for abandoned: it looked, stood still for days, and commits."""
    monkeypatch.setattr("firnline.history.savepoints.pins.RestorePins.keep", lambda *_: False)
    at.do("delta.jump.before", lambda: sweep(root))
    with pytest.raises(RollbackRefusedError, match="vacuumed"):
        Rollback(open_pipeline(options), 2).perform("f" * 16)
    assert rows(root) == 12
    check_goes_on(options, sample)


def test_a_sweep_that_died_is_finished_by_the_next_and_refuses_rollbacks_until_then(
    at: At, options: PipelineOptions, root: Path, sample: SampleInput
) -> None:
    class DiedError(Exception):
        pass

    def die() -> None:
        raise DiedError

    at.do("delta.sweep.after", die)
    with pytest.raises(DiedError):
        gc(str(root), grace_seconds=0)
    plan = Rollback(open_pipeline(options), 2).plan()
    assert "being deleted by gc" in plan.refusals[0].message
    report = gc(str(root), grace_seconds=0)
    assert any("finished what gc" in note for note in report.notes)
    assert [e.message for e in Rollback(open_pipeline(options), 2).plan().refusals if "vacuumed" in e.message]
    assert rows(root) == 12
    check_goes_on(options, sample)


def test_two_sweeps_at_once_delete_once(at: At, options: PipelineOptions, root: Path, sample: SampleInput) -> None:
    at.do("delta.sweep.after", lambda: gc(str(root), grace_seconds=0))
    vacuum(str(root), retention_hours=0, allow_short_retention=True)
    table = Table(str(root), {})
    assert table.refresh()
    assert SweepLog(open_storage(str(root)), table).find_open() is None
    assert rows(root) == 12
    check_goes_on(options, sample)


def test_a_savepoint_is_not_made_of_what_a_sweep_is_about_to_delete(
    at: At, sample: SampleInput, make_options: MakeOptions, tmp_path: Path
) -> None:
    """It read the log, stood still while its files were compacted away, and pins them now."""
    options = make_options(max_files=1)
    make_epochs(sample, options, 3)
    root = Path(options.sinks[0].location)
    taken: list[object] = []
    real = firnline.storage.LocalStorage.put

    def put(self: firnline.storage.LocalStorage, key: str, data: bytes) -> None:
        if "savepoint-" in key and not taken:
            taken.append(key)
            compact(str(root))
            at.do("sweep.declare.after", lambda: real(self, key, data))
            gc(str(root), grace_seconds=0)
        real(self, key, data)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(firnline.storage.LocalStorage, "put", put)
        made, _ = create_savepoint(open_pipeline(options), str(tmp_path / "saved"))
    assert taken
    there = {str(p.relative_to(root)) for p in root.rglob("*.parquet")}
    assert {file.path for file in made.sinks["delta"].files} <= there


def test_a_restore_does_not_take_back_what_a_sweep_is_about_to_delete(
    at: At, sample: SampleInput, make_options: MakeOptions, tmp_path: Path
) -> None:
    """The savepoint was made without copies and is disposed of while it is restored."""
    options = make_options(max_files=1)
    make_epochs(sample, options, 2)
    root, place = Path(options.sinks[0].location), str(tmp_path / "saved")
    create_savepoint(open_pipeline(options), place)
    make_epochs(sample, options, 2, first=3)
    compact(str(root))

    def lose() -> None:
        dispose_savepoint(open_pipeline(options), place)
        gc(str(root), grace_seconds=0)

    at.do("delta.jump.before", lose)
    with pytest.raises(RollbackRefusedError, match="deleted at this moment"):
        restore_savepoint(open_pipeline(options), place, "e" * 16)
    assert rows(root) == 12
    check_goes_on(options, sample)


def test_a_compaction_whose_pin_was_given_up_commits_no_file_that_is_gone(
    at: At, sample: SampleInput, make_options: MakeOptions, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It ran on another host and stood still for more than a day."""
    options = make_options(max_files=1)
    make_epochs(sample, options, 4)
    root = Path(options.sinks[0].location)
    monkeypatch.setattr(compacting, "this_process", lambda: Process("somebody", "elsewhere", 1))
    monkeypatch.setattr(
        firnline.maintenance.references, "COMPACTION_KEPT", -firnline.maintenance.references.COMPACTION_KEPT
    )
    at.do("delta.compact.before", lambda: gc(str(root), grace_seconds=0))
    report = compact(str(root))
    assert report.commits == 1
    assert rows(root) == 12
    check_goes_on(options, sample)


def test_a_unit_that_is_taken_up_again_is_not_committed_while_a_sweep_deletes_its_files(
    at: At, sample: SampleInput, make_options: MakeOptions, monkeypatch: pytest.MonkeyPatch
) -> None:
    options = make_options(max_files=1, mode="staged")
    make_epochs(sample, options, 2)
    root = Path(options.sinks[0].location)
    storage = open_storage(str(root))
    units = sorted(p.name.removesuffix(".meta.json") for p in (root / "_staging/pending").glob("*.meta.json"))
    for name in units:
        reject(storage, name, "for a test", open_pipeline(options).clock)
    monkeypatch.setattr(
        firnline.maintenance.references, "SET_ASIDE_KEPT", -firnline.maintenance.references.SET_ASIDE_KEPT
    )

    def take_up() -> None:
        for name in units:
            retry(storage, name)
        commit_table(str(root))

    at.do("delta.sweep.after", take_up)
    # The metadata is deleted first; a person keeps it from that.
    monkeypatch.setattr("firnline.maintenance.gc.Sweep.delete", lambda *_: None)
    gc(str(root), grace_seconds=0)
    assert table_ids(root) == {}
    assert DeltaTable(root).file_uris() == []


def test_a_history_edit_is_made_onto_the_version_that_was_looked_at(options: PipelineOptions, root: Path) -> None:
    """A check under one version and a commit onto another one would let a sweep come between."""
    seen: list[int | None] = []
    real = DeltaSink.edit

    def noting(self: DeltaSink, commit: object, effect: object, onto: object, version: int | None = None) -> object:
        seen.append(version)
        return real(self, commit, effect, onto, version)  # type: ignore[arg-type]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(DeltaSink, "edit", noting)
        Rollback(open_pipeline(options), 2).perform("f" * 16)
    assert seen
    assert None not in seen
