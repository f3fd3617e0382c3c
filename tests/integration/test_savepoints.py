"""Savepoints: whatever happens afterwards, a restore brings rows and progress back."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
import shutil
import signal
import threading
from collections import Counter
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from deltalake import DeltaTable, write_deltalake

import firnline.checkpoint.ledger
from firnline.checkpoint.codec import canonical, checksum
from firnline.cli.long_task import CopyProgress
from firnline.cli.output import size_text
from firnline.cli.run import Beginning, begin
from firnline.errors import (
    CheckpointError,
    ConfigError,
    DamagedError,
    FencedError,
    FirnlineError,
    NewerFormatError,
    RollbackRefusedError,
    SinkError,
    SourceMovedError,
)
from firnline.history.edits.restore import Restored, restore_savepoint
from firnline.history.edits.rollback import Rollback
from firnline.history.quarantine import load_quarantine
from firnline.history.savepoints.catalog import dispose_savepoint, list_savepoints
from firnline.history.savepoints.create import create_savepoint
from firnline.history.savepoints.files import COPIERS, each
from firnline.history.savepoints.format import Savepoint
from firnline.maintenance.compact import compact
from firnline.maintenance.gc import gc, vacuum
from firnline.options import LocalTierOptions, PipelineOptions, RemoteTierOptions, StoreOptions
from firnline.run.commits import entry_commit
from firnline.run.open_pipeline import open_pipeline
from firnline.storage import LocalStorage
from firnline.stores import open_store
from firnline.stores.audit import load_audit
from tests.support.committers import commit_table
from tests.support.pipelines import MakeOptions, delta_table, file_source, known_files, run_once, run_to_end, two_sinks
from tests.support.samples import SampleInput, files_below, table_ids, table_rows

SAMPLES = Path(__file__).parent.parent / "data" / "formats" / "v1"


def epochs(sample: SampleInput, options: PipelineOptions, count: int, first: int = 1, **fields: Any) -> None:
    """One epoch per file."""
    for number in range(first, first + count):
        sample.add(f"f{number:03d}.json", 3, **fields)
        run_to_end(options)


def save(options: PipelineOptions, path: Path | None = None, *, copy: bool = False) -> tuple[Savepoint, Path]:
    made, place = create_savepoint(open_pipeline(options), str(path) if path else None, copy=copy, run="test")
    return made, Path(place)


def restore(options: PipelineOptions, path: Path, **settings: Any) -> Restored:
    return restore_savepoint(open_pipeline(options), str(path), "test", **settings)


def held(options: PipelineOptions) -> Any:
    return open_pipeline(options).deciding.load()


def elsewhere(options: PipelineOptions, table: Path) -> PipelineOptions:
    """The same pipeline with its deciding table in another place."""
    return dataclasses.replace(options, sinks=(dataclasses.replace(delta_table(options), table=str(table)),))


def wipe(table: str | Path) -> None:
    """What is not the newest version goes, by Firnline's own sweeps without any grace."""
    gc(str(table), grace_seconds=0)
    vacuum(str(table), retention_hours=0, allow_short_retention=True)


def states(options: PipelineOptions) -> list[str]:
    return [found.state for found in list_savepoints(open_pipeline(options))]


# -- the same table -------------------------------------------------------------------------------------


def test_rows_columns_and_progress_come_back_and_the_rest_is_read_again(
    sample: SampleInput, make_options: MakeOptions
) -> None:
    options = make_options(max_files=1, partition_by=("month",))
    epochs(sample, options, 3)
    before, then = table_rows(options.deciding.location), held(options)
    made, path = save(options)
    epochs(sample, options, 2, first=4, extra="x")
    kept = files_below(path)
    result = restore(options, path)
    assert (result.to_epoch, result.epoch, result.files, result.rows, result.copied_bytes) == (3, 6, 9, 9, 0)
    table = DeltaTable(options.deciding.location)
    assert "extra" not in [field.name for field in table.schema().fields], "the log still had the version: columns go"
    assert sorted(table_rows(options.deciding.location), key=str) == sorted(before, key=str)
    now = held(options)
    assert (now.epoch, now.checkpoint.positions) == (6, then.checkpoint.positions)
    assert '"kind":"restore"' in table.history(1)[0]["firnline"]
    assert made.id in table.history(1)[0]["firnline"]
    run_to_end(options)
    assert table_ids(options.deciding.location) == sample.ids
    assert files_below(path) == kept, "a restore only reads"


def test_the_same_command_again_goes_on(sample: SampleInput, make_options: MakeOptions) -> None:
    options = make_options(max_files=1)
    epochs(sample, options, 2)
    made, path = save(options)
    epochs(sample, options, 1, first=3)
    first = restore(options, path)
    run_to_end(options)
    version = DeltaTable(options.deciding.location).version()
    told: list[str] = []
    again = restore(options, path, report=told.append)
    assert (again.already, again.epoch) == (True, first.epoch)
    assert told == [
        f"savepoint {made.id} was restored as epoch {first.epoch} already; going on"
        f" (to go back to it: firnline rollback --to {first.epoch})"
    ]
    Rollback(open_pipeline(options), first.epoch).perform("test")
    assert DeltaTable(options.deciding.location).version() > version
    run_to_end(options)
    assert table_ids(options.deciding.location) == sample.ids


def test_it_is_still_known_when_the_ledger_is_folded(
    sample: SampleInput, make_options: MakeOptions, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(firnline.checkpoint.ledger, "FOLD_ENTRIES", 3)
    options = make_options(max_files=1, rollback_window=1)
    epochs(sample, options, 2)
    _, path = save(options)
    first = restore(options, path)
    epochs(sample, options, 5, first=3)
    gc(options.deciding.location)
    pipeline = open_pipeline(options)
    assert not any(entry.epoch == first.epoch for entry in pipeline.entries(held(options).entry)), "folded away"
    again = restore(options, path)
    assert (again.already, again.epoch) == (True, first.epoch)
    _, folded = save(options)
    epochs(sample, options, 1, first=8)
    restore(options, folded)
    run_to_end(options)
    assert table_ids(options.deciding.location) == sample.ids
    assert len(known_files(pipeline, held(options).entry)) == 8


def test_after_deleted_rows_compaction_and_sweeps_without_grace(sample: SampleInput, make_options: MakeOptions) -> None:
    options = make_options(max_files=1)
    epochs(sample, options, 3)
    before = table_ids(options.deciding.location)
    _, path = save(options)
    DeltaTable(options.deciding.location).delete("id = 2")
    epochs(sample, options, 2, first=4)
    compact(options.deciding.location)
    wipe(options.deciding.location)
    result = restore(options, path)
    assert result.copied_bytes == 0, "the pin kept every file"
    assert any("DELETE" in warning for warning in result.warnings)
    assert table_ids(options.deciding.location) == before
    run_to_end(options)
    assert table_ids(options.deciding.location) == sample.ids


def test_without_the_pin_the_sweeps_delete(sample: SampleInput, make_options: MakeOptions) -> None:
    options = make_options(max_files=1)
    epochs(sample, options, 3)
    made, path = save(options)
    (Path(options.deciding.location) / f"_firnline/pins/savepoint-{made.id}.json").unlink()
    compact(options.deciding.location)
    wipe(options.deciding.location)
    version = DeltaTable(options.deciding.location).version()
    with pytest.raises(RollbackRefusedError, match=r"3 file\(s\) of the savepoint are gone"):
        restore(options, path)
    assert DeltaTable(options.deciding.location).version() == version, "refused before anything was written"


def test_with_copies_after_anybodys_vacuum(sample: SampleInput, make_options: MakeOptions) -> None:
    options = make_options(max_files=1, partition_by=("month",))
    epochs(sample, options, 3)
    before = table_ids(options.deciding.location)
    made, path = save(options, copy=True)
    epochs(sample, options, 1, first=4, extra="x")
    table = DeltaTable(options.deciding.location)
    table.optimize.compact()
    table.vacuum(retention_hours=0, enforce_retention_duration=False, dry_run=False)
    result = restore(options, path)
    assert result.copied_bytes == made.size_bytes
    assert table_ids(options.deciding.location) == before
    rows = table_rows(options.deciding.location)
    assert all(row["extra"] is None for row in rows), "files were copied in: later columns stay, and are empty"
    run_to_end(options)
    assert table_ids(options.deciding.location) == sample.ids
    assert not list((Path(options.deciding.location) / "_firnline/pins").glob("restore-*"))


def test_when_the_log_no_longer_reaches_back(sample: SampleInput, make_options: MakeOptions) -> None:
    """The files are there, so they are copied within the table."""
    options = make_options(max_files=1)
    epochs(sample, options, 2)
    before = table_ids(options.deciding.location)
    made, path = save(options)
    epochs(sample, options, 2, first=3)
    table = DeltaTable(options.deciding.location)
    table.create_checkpoint()
    for log in (Path(options.deciding.location) / "_delta_log").glob("*.json"):
        if int(log.stem) < table.version():
            log.unlink()
    assert restore(options, path).copied_bytes == made.size_bytes
    assert table_ids(options.deciding.location) == before
    run_to_end(options)
    assert table_ids(options.deciding.location) == sample.ids


def test_one_can_go_back_over_a_restore(sample: SampleInput, make_options: MakeOptions) -> None:
    options = make_options(max_files=1)
    epochs(sample, options, 3)
    _, path = save(options)
    epochs(sample, options, 1, first=4)
    at = restore(options, path).epoch
    epochs(sample, options, 1, first=5)
    Rollback(open_pipeline(options), at).perform("test")
    assert sum(table_ids(options.deciding.location).values()) == 9
    Rollback(open_pipeline(options), 2).perform("test")
    assert sum(table_ids(options.deciding.location).values()) == 6
    restore(options, path)
    assert sum(table_ids(options.deciding.location).values()) == 9
    run_to_end(options)
    assert table_ids(options.deciding.location) == sample.ids


def test_an_active_run_is_fenced(sample: SampleInput, make_options: MakeOptions) -> None:
    options = make_options(max_files=1)
    epochs(sample, options, 2)
    _, path = save(options)
    epochs(sample, options, 1, first=3)
    pipeline = open_pipeline(options)
    pipeline.deciding.claim("active")
    entry = next(iter(pipeline.entries(held(options).entry)))
    commit = entry_commit(
        pipeline, pipeline.deciding, entry, held(options).entry, pipeline.deciding.find_committed_schema()
    )
    restore(options, path)
    with pytest.raises(FencedError):
        pipeline.deciding.commit(
            dataclasses.replace(commit, checkpoint=dataclasses.replace(commit.checkpoint, epoch=9))
        )


def test_what_the_source_no_longer_has_is_told(sample: SampleInput, make_options: MakeOptions) -> None:
    options = make_options(max_files=1)
    epochs(sample, options, 1)
    _, path = save(options)
    epochs(sample, options, 2, first=2)
    sample.path("f002.json").unlink()
    told: list[str] = []
    result = restore(options, path, report=told.append)
    assert any("1 file(s) that were read after the savepoint" in w and "f002.json" in w for w in result.warnings)
    assert any(line.startswith("warning: ") for line in told)


def test_a_moved_source_is_told_before_anything_is_changed(
    sample: SampleInput, make_options: MakeOptions, tmp_path: Path
) -> None:
    options = make_options(max_files=1)
    epochs(sample, options, 2)
    _, path = save(options)
    epochs(sample, options, 1, first=3)
    os.rename(tmp_path / "in", tmp_path / "moved")
    there = dataclasses.replace(
        options, sources=(dataclasses.replace(file_source(options), path=str(tmp_path / "moved")),)
    )
    moved = (str(tmp_path / "in"), str(tmp_path / "moved"))
    version = DeltaTable(options.deciding.location).version()
    with pytest.raises(SourceMovedError) as caught:
        restore(there, path)
    assert f"--source-moved {moved[0]}={moved[1]}" in caught.value.hint
    assert DeltaTable(options.deciding.location).version() == version
    restore_savepoint(open_pipeline(there, moved=moved), str(path), "test")
    assert run_once(there, moved=moved).exit_code == 0
    assert restore(there, path).already, "a repeat need not be told of the move any more"
    run_to_end(there)
    Rollback(open_pipeline(there), 2).perform("test")
    begin(there, Beginning(from_savepoint=str(path)), "test", lambda _: None, moved=moved)
    assert run_once(there, moved=moved).exit_code == 0
    assert table_ids(options.deciding.location) == sample.ids


# -- another table --------------------------------------------------------------------------------------


@pytest.mark.parametrize("copy", [False, True])
def test_into_an_empty_place_after_the_folder_moved(
    sample: SampleInput, make_options: MakeOptions, tmp_path: Path, copy: bool
) -> None:
    options = make_options(max_files=1, partition_by=("month",))
    epochs(sample, options, 3)
    before = table_ids(options.deciding.location)
    _, path = save(options, copy=copy)
    epochs(sample, options, 1, first=4)
    moved = tmp_path / "far" / "away"
    moved.parent.mkdir()
    os.rename(path, moved)
    assert states(options) == ["missing"]
    if copy:
        shutil.rmtree(options.deciding.location)
    there = elsewhere(options, tmp_path / "new" / "table")
    result = restore(there, moved)
    assert result.epoch == 4
    assert table_ids(there.deciding.location) == before
    assert restore(there, moved).already
    sample.add("a-late.json", 2)
    run_to_end(there)
    assert table_ids(there.deciding.location) == sample.ids
    assert held(there).epoch > 4
    log = "".join(p.read_text() for p in sorted((Path(there.deciding.location) / "_delta_log").glob("*.json")))
    stats = [json.loads(line)["add"]["stats"] for line in log.splitlines() if '"add"' in line]
    assert all(json.loads(text)["numRecords"] for text in stats)


def test_quarantine_comes_along(sample: SampleInput, make_options: MakeOptions, tmp_path: Path) -> None:
    options = make_options(max_files=1)
    sample.add("a.json", 3, bad=2)
    run_to_end(options)
    _, path = save(options)
    sample.add("b.json", 3, bad=1)
    there = elsewhere(options, tmp_path / "new")
    restore(there, path)
    run_to_end(there)
    found = [bytes(record["raw"]).strip() for record in load_quarantine(open_pipeline(there))]
    assert sorted(found) == sorted(sample.bad.elements())
    gone = dispose_savepoint(open_pipeline(options), str(path))
    assert gone.files == 3
    assert not path.exists()


def test_awkward_partition_values_survive(sample: SampleInput, make_options: MakeOptions, tmp_path: Path) -> None:
    options = make_options(max_files=1, partition_by=("place",))
    for number, place in enumerate(["a b", "x/y=z", "100%", "", None, "é"]):
        sample.add(f"p{number}.json", 2, place=place)
    run_to_end(options)
    write_deltalake(
        options.deciding.location,
        pa.table({"id": pa.array([77], pa.int64()), "place": ["w w/%20"]}),
        mode="append",
        schema_mode="merge",
    )
    before = sorted(map(str, ((r["id"], r["place"]) for r in table_rows(options.deciding.location))))
    _, path = save(options, copy=True)
    there = elsewhere(options, tmp_path / "new")
    restore(there, path)
    assert sorted(map(str, ((r["id"], r["place"]) for r in table_rows(there.deciding.location)))) == before
    run_to_end(there)


def test_rows_of_others_are_not_lost_in_silence(sample: SampleInput, make_options: MakeOptions, tmp_path: Path) -> None:
    options = make_options(max_files=1)
    epochs(sample, options, 2)
    _, path = save(options)
    other = SampleInput(tmp_path / "other")
    other.add("x.json", 2)
    run_to_end(make_options(name="other", path=str(other.folder)))
    with pytest.raises(RollbackRefusedError, match="rows of others, which would be lost: other") as caught:
        restore(options, path)
    assert "--accept other" in caught.value.hint
    restore(options, path, accept=["other"])
    foreign = elsewhere(options, tmp_path / "foreign")
    write_deltalake(foreign.deciding.location, pa.table({"id": pa.array([-1], pa.int64())}))
    with pytest.raises(RollbackRefusedError, match="rows of others"):
        restore(foreign, path)
    assert table_ids(foreign.deciding.location) == Counter({-1: 1})


def test_onto_another_history_of_the_same_name(sample: SampleInput, make_options: MakeOptions, tmp_path: Path) -> None:
    """Epochs only grow: the one that the restore makes is newer than any that either history has."""
    options = make_options(max_files=1)
    epochs(sample, options, 2)
    _, path = save(options)
    there = elsewhere(options, tmp_path / "other")
    epochs(sample, there, 4, first=3)
    newest = held(there).epoch
    result = restore(there, path)
    assert result.epoch == newest + 1
    assert sum(table_ids(there.deciding.location).values()) == 6
    run_to_end(there)
    assert table_ids(there.deciding.location) == sample.ids


def test_a_store_that_knows_more_than_the_new_table(
    sample: SampleInput, make_options: MakeOptions, tmp_path: Path
) -> None:
    options = make_options(max_files=1, store=StoreOptions(type="file", path=str(tmp_path / "store" / "checkpoints")))
    epochs(sample, options, 2)
    _, path = save(options, copy=True)
    assert path.parent == tmp_path / "store" / "savepoints"
    epochs(sample, options, 3, first=3)
    shutil.rmtree(options.deciding.location)
    assert restore(options, path).epoch == 6
    run_to_end(options)
    assert table_ids(options.deciding.location) == sample.ids
    assert options.checkpoint.store is not None
    trail = load_audit(open_store(options.checkpoint.store), options.name)
    told = [(entry.record.what, entry.record.outcome) for entry in trail if entry.record is not None]
    assert told == [
        ("restore", "done"), ("restore", "begun"), ("savepoint-create", "done"), ("savepoint-create", "begun"),
    ]  # fmt: skip


# -- several sinks and staged tables --------------------------------------------------------------------


@pytest.mark.parametrize("place", ["same", "swept", "new", "half"])
def test_every_sink_comes_back(sample: SampleInput, make_options: MakeOptions, tmp_path: Path, place: str) -> None:
    options = make_options(max_files=1, sinks=two_sinks(tmp_path))
    epochs(sample, options, 2)
    before = table_ids(options.sinks[0].location)
    _, path = save(options, copy=True)
    epochs(sample, options, 2, first=3)
    target = options
    if place == "swept":
        for sink in options.sinks:
            table = DeltaTable(sink.location)
            table.optimize.compact()
            table.vacuum(retention_hours=0, enforce_retention_duration=False, dry_run=False)
    elif place == "new":
        target = dataclasses.replace(options, sinks=two_sinks(tmp_path / "new"))
    elif place == "half":
        shutil.rmtree(options.sinks[0].location)
    restore(target, path)
    for sink in target.sinks:
        assert table_ids(sink.location) == before
    run_to_end(target)
    for sink in target.sinks:
        assert table_ids(sink.location) == sample.ids


def test_a_sink_that_was_not_reached_is_brought_through_by_the_next_run(
    sample: SampleInput, make_options: MakeOptions, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    options = make_options(max_files=1, sinks=two_sinks(tmp_path))
    epochs(sample, options, 2)
    _, path = save(options, copy=True)
    epochs(sample, options, 1, first=3)
    target = dataclasses.replace(options, sinks=two_sinks(tmp_path / "new"))
    from firnline.run import edits

    def lost(*_: Any) -> int:
        raise SinkError("the network is gone")

    with monkeypatch.context() as patch:
        patch.setattr(edits, "settle_edits", lost)
        told: list[str] = []
        restore(target, path, report=told.append)
        assert "copy follows when the next run joins it: the network is gone" in told
    assert not (tmp_path / "new" / "two" / "_delta_log").exists()
    assert restore(target, path).already
    run_to_end(target)
    for sink in target.sinks:
        assert table_ids(sink.location) == sample.ids


def test_a_further_sink_that_is_lost_comes_back_over_a_rollback(
    sample: SampleInput, make_options: MakeOptions, tmp_path: Path
) -> None:
    options = make_options(max_files=1, sinks=two_sinks(tmp_path))
    epochs(sample, options, 3)
    _, path = save(options, copy=True)
    Rollback(open_pipeline(options), 1).perform("test")
    run_to_end(options)
    shutil.rmtree(options.sinks[1].location)
    restore(options, path)
    epochs(sample, options, 1, first=4)
    for sink in options.sinks:
        assert table_ids(sink.location) == sample.ids


def test_a_sink_that_lags_is_named(
    sample: SampleInput, make_options: MakeOptions, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    options = make_options(max_files=1, sinks=two_sinks(tmp_path))
    epochs(sample, options, 2)
    Rollback(open_pipeline(dataclasses.replace(options, sinks=options.sinks[:1])), 1).perform("test")
    monkeypatch.setattr("firnline.history.savepoints.create.LOOKS", 2)
    with pytest.raises(SinkError, match="copy at epoch 2"):
        save(options)


@pytest.mark.parametrize("copy", [False, True])
def test_staged_tables(sample: SampleInput, make_options: MakeOptions, tmp_path: Path, copy: bool) -> None:
    """Units that are pending are no part of a savepoint; those that are pending at a restore are dropped."""
    options = make_options(max_files=1, mode="staged")
    epochs(sample, options, 2)
    with pytest.raises(CheckpointError, match="no epoch to save yet"):
        save(options)
    commit_table(options.deciding.location)
    epochs(sample, options, 1, first=3)
    made, path = save(options, copy=copy)
    assert made.epoch == 2
    commit_table(options.deciding.location)
    epochs(sample, options, 2, first=4)
    assert restore(options, path).epoch == 6
    assert not list((Path(options.deciding.location) / "_staging/pending").glob("*.meta.json"))
    commit_table(options.deciding.location)
    assert sum(table_ids(options.deciding.location).values()) == 6
    there = elsewhere(options, tmp_path / "new")
    for target in (options, there):
        restore(target, path)
        run_to_end(target)
        commit_table(target.deciding.location)
        assert table_ids(target.deciding.location) == sample.ids


# -- create, list, dispose ------------------------------------------------------------------------------


def test_a_folder_that_holds_something_is_refused(
    sample: SampleInput, make_options: MakeOptions, tmp_path: Path
) -> None:
    options = make_options(max_files=1)
    with pytest.raises(CheckpointError, match="no epoch to save yet") as caught:
        save(options)
    assert caught.value.exit_code == 1
    epochs(sample, options, 1)
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "notes.txt").write_text("mine")
    with pytest.raises(ConfigError, match="is not empty"):
        save(options, tmp_path / "mine")
    assert not (Path(options.deciding.location) / "_firnline/pins").exists()


@pytest.mark.parametrize("place", ["in/s", "table/s", "store/s", "local/s", "remote/s", "store", "alias/s"])
def test_a_place_that_is_used_otherwise_is_refused(
    sample: SampleInput, make_options: MakeOptions, tmp_path: Path, place: str
) -> None:
    options = make_options(max_files=1, table=str(tmp_path / "table"))
    epochs(sample, options, 1)
    (tmp_path / "alias").symlink_to(tmp_path / "in")
    checkpoint = dataclasses.replace(
        options.checkpoint,
        store=StoreOptions(type="file", path=str(tmp_path / "store" / "deep")),
        local=LocalTierOptions(str(tmp_path / "local")),
        remote=RemoteTierOptions(str(tmp_path / "remote")),
    )
    if place == "store/s":
        checkpoint = dataclasses.replace(checkpoint, store=StoreOptions(type="object", uri=str(tmp_path / "store")))
    with pytest.raises(ConfigError, match="cannot hold a savepoint"):
        save(dataclasses.replace(options, checkpoint=checkpoint), tmp_path / place)
    assert not (tmp_path / place / "savepoint.json").exists()
    assert states(options) == []
    run_to_end(options)
    assert table_ids(options.deciding.location) == sample.ids


def test_a_place_that_cannot_be_written_is_told_before_anything_is_pinned(
    sample: SampleInput, make_options: MakeOptions, tmp_path: Path
) -> None:
    options = make_options(max_files=1)
    epochs(sample, options, 1)
    (tmp_path / "file").write_text("not a folder")
    for place in (tmp_path / "file" / "s", Path("/proc/firnline-savepoint")):
        with pytest.raises(ConfigError, match="cannot be written"):
            save(options, place)
    assert states(options) == []
    (tmp_path / "left").mkdir()
    (tmp_path / "left" / ".0123.tmp").write_text("of a write that was killed")
    save(options, tmp_path / "left")
    assert states(options) == ["complete"]


def test_a_failing_copy_of_the_ledger_is_not_taken_for_a_fold(
    sample: SampleInput, make_options: MakeOptions, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    options = make_options(max_files=1)
    epochs(sample, options, 1)
    original = LocalStorage.put

    def fail(storage: LocalStorage, key: str, data: bytes) -> None:
        if key.startswith("ledger/"):
            raise FileNotFoundError("the share is gone")
        original(storage, key, data)

    monkeypatch.setattr(LocalStorage, "put", fail)
    with pytest.raises(FileNotFoundError, match="the share is gone"):
        save(options, tmp_path / "s")


@pytest.mark.parametrize("how", ["damaged", "newer"])
def test_a_pin_that_cannot_be_read_is_listed(sample: SampleInput, make_options: MakeOptions, how: str) -> None:
    options = make_options(max_files=1)
    epochs(sample, options, 1)
    made, path = save(options)
    save(options, path.parent / "second")
    pin = Path(options.deciding.location) / f"_firnline/pins/savepoint-{made.id}.json"
    if how == "newer":
        reseal(pin, lambda body: body.update(format=99))
    else:
        pin.write_bytes(pin.read_bytes()[:-9])
    with pytest.raises(CheckpointError):
        gc(options.deciding.location)
    assert states(options) == ["complete", "damaged"]
    assert list_savepoints(open_pipeline(options))[1].id == made.id
    dispose_savepoint(open_pipeline(options), str(path))
    assert states(options) == ["complete"]
    gc(options.deciding.location)


@pytest.mark.parametrize("how", ["interrupt", "stop"])
def test_copying_ends_when_one_is_interrupted(how: str) -> None:
    """The main thread is interrupted while jobs run, or asked to stop: what was begun ends, nothing else begins."""
    begun: list[int] = []
    interrupted = threading.Event()
    main = threading.get_ident()

    def job(number: int) -> int:
        begun.append(number)
        if how == "interrupt" and len(begun) == COPIERS:
            signal.pthread_kill(main, signal.SIGINT)
        assert interrupted.wait(60)
        return number

    def handle(*_: Any) -> None:
        interrupted.set()
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGINT, handle)
    if how == "stop":
        interrupted.set()
    try:
        with pytest.raises(KeyboardInterrupt):
            each("copying", range(40), job, lambda _: 1, None, lambda: how == "stop" and len(begun) >= COPIERS)
    finally:
        signal.signal(signal.SIGINT, before)
    assert COPIERS <= len(begun) <= 2 * COPIERS


def test_a_stopped_create_is_listed_and_disposed_of(
    sample: SampleInput, make_options: MakeOptions, tmp_path: Path
) -> None:
    options = make_options(max_files=1)
    epochs(sample, options, 2)
    place = tmp_path / "s"
    with pytest.raises(KeyboardInterrupt):
        create_savepoint(open_pipeline(options), str(place), copy=True, stopping=lambda: True)
    assert states(options) == ["incomplete"]
    dispose_savepoint(open_pipeline(options), str(place))
    assert states(options) == []


def test_a_stopped_restore_has_decided_nothing(sample: SampleInput, make_options: MakeOptions, tmp_path: Path) -> None:
    options = make_options(max_files=1)
    epochs(sample, options, 2)
    _, path = save(options, copy=True)
    there = elsewhere(options, tmp_path / "new")
    with pytest.raises(KeyboardInterrupt):
        restore(there, path, stopping=lambda: True)
    assert not (tmp_path / "new" / "_delta_log").exists()
    restore(there, path)
    run_to_end(there)
    assert table_ids(there.deciding.location) == sample.ids


def test_copy_progress_has_a_unit_and_ends_at_the_total() -> None:
    said: list[str] = []
    now = iter([0.0, 1.0, 3.0, 3.0, 3.1, 3.2, 3.2])
    progress = CopyProgress(said.append, lambda: next(now))
    for done_bytes in (1024, 2048, 3072, 4096):
        progress("copying main", done_bytes, 4096)
    assert said == [
        f"copying main: {size_text(2048)} of {size_text(4096)}",
        f"copying main: {size_text(4096)} of {size_text(4096)}",
    ]


def test_listed_and_disposed_of(sample: SampleInput, make_options: MakeOptions, tmp_path: Path) -> None:
    options = make_options(max_files=1)
    epochs(sample, options, 2)
    first, path = save(options)
    epochs(sample, options, 1, first=3)
    second, there = save(options, tmp_path / "second", copy=True)
    found = list_savepoints(open_pipeline(options))
    assert [(s.id, s.epoch, s.path, s.copied, s.state) for s in found] == [
        (first.id, 2, str(path), False, "complete"),
        (second.id, 3, str(there), True, "complete"),
    ]
    assert found[1].size_bytes == second.size_bytes
    (there / "notes.txt").write_text("mine")
    looked = dispose_savepoint(open_pipeline(options), str(there), dry_run=True)
    assert (looked.files, looked.pins) == (1 + 3 + 3, 1)
    assert len(list_savepoints(open_pipeline(options))) == 2
    dispose_savepoint(open_pipeline(options), str(there))
    assert files_below(there) == {"notes.txt": b"mine"}
    dispose_savepoint(open_pipeline(options), first.id)
    assert not path.exists()
    assert list_savepoints(open_pipeline(options)) == []
    compact(options.deciding.location)
    wipe(options.deciding.location)
    assert len(list(Path(options.deciding.location).glob("*.parquet"))) == 1, "nothing is pinned any more"


def test_disposing_of_a_copy_leaves_the_pins_to_the_original(
    sample: SampleInput, make_options: MakeOptions, tmp_path: Path
) -> None:
    options = make_options(max_files=1)
    epochs(sample, options, 2)
    made, path = save(options)
    shutil.copytree(path, tmp_path / "copy")
    gone = dispose_savepoint(open_pipeline(options), str(tmp_path / "copy"))
    assert (gone.id, gone.pins, gone.pins_kept) == (made.id, 0, True)
    assert states(options) == ["complete"]
    shutil.move(path, tmp_path / "moved")
    gone = dispose_savepoint(open_pipeline(options), str(tmp_path / "moved"))
    assert (gone.pins, gone.pins_kept) == (1, False)
    assert states(options) == []


def test_what_is_no_savepoint_of_the_pipeline_is_not_disposed_of(
    sample: SampleInput, make_options: MakeOptions, tmp_path: Path
) -> None:
    options = make_options(max_files=1)
    epochs(sample, options, 1)
    _, path = save(options)
    other = make_options(name="other", table=str(tmp_path / "other"))
    kept = files_below(path)
    for target in (str(path), str(tmp_path / "in"), "0123456789abcdef"):
        with pytest.raises(ConfigError):
            dispose_savepoint(open_pipeline(other), target)
    assert files_below(path) == kept
    with pytest.raises(RollbackRefusedError, match="savepoint of 'demo', not of 'other'"):
        restore(other, path)


def test_a_table_whose_files_are_not_all_there_is_refused(sample: SampleInput, make_options: MakeOptions) -> None:
    options = make_options(max_files=1)
    epochs(sample, options, 1)
    DeltaTable(options.deciding.location).alter.set_table_properties(
        {"delta.enableDeletionVectors": "true"}, raise_if_not_exists=False
    )
    log = max((Path(options.deciding.location) / "_delta_log").glob("*.json"))
    if "deletionVectors" not in log.read_text():
        features = ["deletionVectors"]
        action = {"protocol": {"minReaderVersion": 3, "minWriterVersion": 7, "readerFeatures": features,
                               "writerFeatures": features}}  # fmt: skip
        log.write_text(log.read_text().rstrip("\n") + "\n" + json.dumps(action) + "\n")
    with pytest.raises(ConfigError, match="deletionVectors"):
        save(options)


# -- damage and malice ----------------------------------------------------------------------------------


def reseal(path: Path, change: Any) -> None:
    """Change a manifest and give it a checksum that fits."""
    body = json.loads(path.read_text())
    del body["checksum"]
    change(body)
    body["checksum"] = checksum(canonical(body))
    path.write_text(json.dumps(body))


def set_path(name: str) -> Any:
    def change(body: Any) -> None:
        body["sinks"]["delta"]["files"][0]["path"] = name

    return change


def rename_sink(body: Any) -> None:
    body["sinks"]["elsewhere"] = body["sinks"].pop("delta")


HOSTILE: dict[str, tuple[Any, type[FirnlineError]]] = {
    "above": (set_path("../../in/f001.json"), DamagedError),
    "absolute": (set_path("/etc/passwd"), DamagedError),
    "uri": (set_path("file:///etc/passwd"), DamagedError),
    "twice": (set_path("x//y.parquet"), DamagedError),
    "quarantine": (
        lambda b: b["quarantine"].append({**b["ledger"][0], "name": "../../x.parquet"}),
        DamagedError,
    ),
    "ledger": (lambda b: b["ledger"][0].update(name="../../../x.json"), DamagedError),
    "entry": (lambda b: b["entry"].update(name="../x.json"), DamagedError),
    "id": (lambda b: b.update(id="../../x"), DamagedError),
    "epoch": (lambda b: b.update(epoch=99), DamagedError),
    "format": (lambda b: b.update(format=99), NewerFormatError),
    "sink name": (lambda b: b["sinks"].update({"../x": b["sinks"]["delta"]}), DamagedError),
    "other sinks": (rename_sink, RollbackRefusedError),
    "partitions": (lambda b: b["sinks"]["delta"].update(partition_by=["v"], files=[]), RollbackRefusedError),
    "no files": (lambda b: b["sinks"]["delta"].pop("files"), DamagedError),
    "list": (lambda b: b.update(sinks=[]), DamagedError),
}


@pytest.mark.parametrize("case", HOSTILE)
def test_hostile_manifests(sample: SampleInput, make_options: MakeOptions, tmp_path: Path, case: str) -> None:
    options = make_options(max_files=1)
    epochs(sample, options, 2)
    _, path = save(options, tmp_path / "s" / "p", copy=True)
    change, error = HOSTILE[case]
    reseal(path / "savepoint.json", change)
    there = elsewhere(options, tmp_path / "new")
    outside = files_below(tmp_path / "in")
    with pytest.raises(error):
        restore(there, path)
    assert not (tmp_path / "new").exists()
    if error is DamagedError:
        (Path(options.deciding.location) / "_firnline/pins").rename(tmp_path / "pins")
        with pytest.raises(FirnlineError):
            dispose_savepoint(open_pipeline(options), str(path))
    assert files_below(tmp_path / "in") == outside


@pytest.mark.parametrize("name", ["savepoint.json", "ledger", "data"])
def test_links_are_refused(sample: SampleInput, make_options: MakeOptions, tmp_path: Path, name: str) -> None:
    options = make_options(max_files=1)
    epochs(sample, options, 1)
    _, path = save(options, copy=True)
    os.rename(path / name, tmp_path / "real")
    (path / name).symlink_to(tmp_path / "real")
    with pytest.raises(DamagedError):
        restore(elsewhere(options, tmp_path / "new"), path)
    (Path(options.deciding.location) / "_firnline/pins").rename(tmp_path / "pins")
    with pytest.raises(DamagedError):
        dispose_savepoint(open_pipeline(options), str(path))
    assert (tmp_path / "real").exists()


def test_every_flipped_bit_of_the_manifest_is_found(
    sample: SampleInput, make_options: MakeOptions, tmp_path: Path
) -> None:
    options = make_options(max_files=1)
    epochs(sample, options, 1)
    _, path = save(options)
    whole = (path / "savepoint.json").read_bytes()
    intact = Savepoint.from_bytes(whole)
    for at in range(len(whole)):
        for bit in (0x01, 0x80):
            broken = bytes([*whole[:at], whole[at] ^ bit, *whole[at + 1 :]])
            try:
                found = Savepoint.from_bytes(broken)
            except FirnlineError:
                continue
            assert found == intact, f"byte {at}"
    for length in range(0, len(whole) - 1, 7):
        with pytest.raises(DamagedError):
            Savepoint.from_bytes(whole[:length])


@pytest.mark.parametrize("kind", ["ledger", "quarantine", "data"])
def test_flipped_bits_and_cut_files_are_found_before_anything_is_committed(
    sample: SampleInput, make_options: MakeOptions, tmp_path: Path, kind: str
) -> None:
    options = make_options(max_files=1)
    sample.add("f000.json", 3, bad=1)
    epochs(sample, options, 2)
    _, path = save(options, copy=True)
    target = next(p for p in sorted((path / kind).rglob("*")) if p.is_file())
    whole = target.read_bytes()
    there = elsewhere(options, tmp_path / "new")
    for at in range(0, len(whole), max(1, len(whole) // 12)):
        target.write_bytes(bytes([*whole[:at], whole[at] ^ 0x10, *whole[at + 1 :]]))
        with pytest.raises(DamagedError):
            restore(there, path)
    target.write_bytes(whole[:-1])
    with pytest.raises(DamagedError):
        restore(there, path)
    target.unlink()
    with pytest.raises(DamagedError):
        restore(there, path)
    assert not (tmp_path / "new" / "_delta_log").exists()
    target.write_bytes(whole)
    assert hashlib.sha256(target.read_bytes()).hexdigest() == hashlib.sha256(whole).hexdigest()
    restore(there, path)
    run_to_end(there)
    assert table_ids(there.deciding.location) == sample.ids


def test_a_damaged_file_that_was_not_copied_is_found_by_its_footer(
    sample: SampleInput, make_options: MakeOptions, tmp_path: Path
) -> None:
    options = make_options(max_files=1)
    epochs(sample, options, 1)
    _, path = save(options)
    file = next(Path(options.deciding.location).glob("*.parquet"))
    whole = file.read_bytes()
    file.write_bytes(whole[:-8] + b"\xff\xff\xff\x7f" + whole[-4:])
    with pytest.raises(DamagedError):
        restore(elsewhere(options, tmp_path / "new"), path)
    assert not (tmp_path / "new" / "_delta_log").exists()


def test_another_entry_under_the_same_name_is_refused(
    sample: SampleInput, make_options: MakeOptions, tmp_path: Path
) -> None:
    options = make_options(max_files=1)
    epochs(sample, options, 1)
    made, path = save(options)
    folder = tmp_path / "new" / "_firnline" / "demo" / "ledger"
    folder.mkdir(parents=True)
    (folder / made.entry.name).write_bytes(b"{}")
    with pytest.raises(DamagedError, match="one of them is damaged"):
        restore(elsewhere(options, tmp_path / "new"), path)
    assert (folder / made.entry.name).read_bytes() == b"{}"


# -- what format 1 wrote --------------------------------------------------------------------------------


def test_a_savepoint_of_format_1_is_restored(sample: SampleInput, make_options: MakeOptions, tmp_path: Path) -> None:
    """Kept from when format 1 was written: two files of three records each were read, the second with a bad one."""
    options = make_options(name="orders", max_files=1, partition_by=("month",))
    path = tmp_path / "kept"
    shutil.copytree(SAMPLES / "savepoint", path)
    root = json.loads((path / "savepoint.json").read_text())["checkpoint"]["positions"]["files"]["root"]
    pipeline = open_pipeline(options, moved=(root, str(tmp_path / "in")))
    assert restore_savepoint(pipeline, str(path), "test").epoch == 3
    assert table_ids(options.deciding.location) == Counter(dict.fromkeys([1, 2, 3, 4, 5, 6], 1))
    sample.add("f2.json", 3)
    sample.add("a-late.json", 3)
    assert run_once(options, moved=(root, str(tmp_path / "in"))).exit_code == 0
    assert sum(table_ids(options.deciding.location).values()) == 12
    assert len(known_files(open_pipeline(options), held(options).entry)) == 4
    assert [bytes(record["raw"]) for record in load_quarantine(open_pipeline(options))] == [b"{bad 7"]
