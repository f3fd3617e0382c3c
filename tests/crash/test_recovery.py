"""What is left of a checkpoint decides: repaired, rebuilt or refused; never a wrong position, never a fresh start."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from deltalake import DeltaTable

from firnline.checkpoint.ledger import Ledger
from firnline.checkpoint.model import Checkpoint
from firnline.errors import CheckpointError, DamagedError, LedgerHoleError
from firnline.options import PipelineOptions
from firnline.run.open_pipeline import open_pipeline
from firnline.sinks.delta.log import DeltaLog, decode_blizzard
from firnline.sinks.delta.recovery import find_checkpoint
from firnline.sinks.delta.sink import as_delta
from firnline.storage import open_storage
from firnline.types import Json
from tests.support.damage import (
    break_info,
    change_info,
    commit_files,
    commits_of,
    cuts,
    find_info,
    flips,
    ledger_files,
)
from tests.support.pipelines import MakeOptions, file_source, known_files, run_once
from tests.support.samples import SampleInput, table_ids

pytestmark = pytest.mark.crash


@pytest.fixture
def options(sample: SampleInput, make_options: MakeOptions) -> PipelineOptions:
    """A table with four epochs, the last one with a file half read, one set aside and one that failed once."""
    sample.add("a1.json", 4)
    sample.add("a2.json.gz", 4)
    sample.add("a3.json", 3)
    sample.add_truncated("b0.json.gz")
    sample.add("b1.json", 9)
    sample.add("b2.json", 4)
    options: PipelineOptions = make_options(max_files=2, max_events=4, file_attempts=2)
    assert run_once(options).exit_code == 0
    return options


def table_of(options: PipelineOptions) -> Path:
    return Path(options.sinks[0].location)


def go_on(options: PipelineOptions, sample: SampleInput, *, hole: bool = False) -> None:
    """A new file arrives; everything is there exactly once. A hole in the ledger is told at the end."""
    sample.add("z9.json", 3)
    run = run_once(options)
    assert (run.exit_code, run.error_code) == ((1, "ledger-hole") if hole else (0, "")), run.result
    assert table_ids(table_of(options)) == sample.ids


def refuse(options: PipelineOptions, sample: SampleInput, code: str) -> None:
    """A run stops with a clear error and has written nothing."""
    before = DeltaTable(str(table_of(options))).version()
    sample.add("z9.json", 3)
    run = run_once(options)
    assert run.exit_code == 1
    assert run.error_code == code
    assert DeltaTable(str(table_of(options))).version() == before


def newest_entry(options: PipelineOptions) -> Path:
    return ledger_files(table_of(options), options.name)[-1]


def newest_commit(options: PipelineOptions) -> Path:
    return commits_of(table_of(options), options.name)[-1]


# -- one copy damaged ---------------------------------------------------------------------------------


def test_entry_missing(options: PipelineOptions, sample: SampleInput) -> None:
    newest_entry(options).unlink()
    assert any("ledger entry" in repair for repair in open_pipeline(options).load().repairs)
    go_on(options, sample, hole=True)


def test_entry_empty(options: PipelineOptions, sample: SampleInput) -> None:
    newest_entry(options).write_bytes(b"")
    go_on(options, sample, hole=True)


def test_commit_info_damaged(options: PipelineOptions, sample: SampleInput) -> None:
    break_info(newest_commit(options))
    go_on(options, sample)


def test_commit_info_of_every_commit_damaged(options: PipelineOptions, sample: SampleInput) -> None:
    for path in commits_of(table_of(options), options.name):
        break_info(path)
    go_on(options, sample)


def test_entry_that_a_commit_names_wrongly(options: PipelineOptions, sample: SampleInput) -> None:
    info = find_info(newest_commit(options))
    assert info is not None
    newest_entry(options).unlink()
    change_info(newest_commit(options), lambda text: text.replace(info["entry"]["checksum"], "0" * 64))
    go_on(options, sample, hole=True)


# -- several copies damaged ---------------------------------------------------------------------------


def damage_checkpoint_part(path: Path) -> None:
    text = path.read_text()
    at = text.index('"checkpoint":{')
    path.write_text(text[:at] + text[at:].replace('"run":"', '"run":"x', 1))


def test_rebuilt_from_the_one_before(options: PipelineOptions, sample: SampleInput) -> None:
    damage_checkpoint_part(newest_entry(options))
    break_info(newest_commit(options))
    assert len(open_pipeline(options).load().repairs) == 2
    go_on(options, sample, hole=True)
    go_on_again = run_once(options)  # the rebuilt link is a hole in the chain: no reconcile, nothing doubled
    assert go_on_again.error_code == "ledger-hole"
    assert table_ids(table_of(options)) == sample.ids


def test_nothing_intact_is_refused(options: PipelineOptions, sample: SampleInput) -> None:
    newest_entry(options).write_bytes(b"{}")
    break_info(newest_commit(options))
    refuse(options, sample, "checkpoint-lost")


def test_whole_ledger_and_log_information_lost(options: PipelineOptions, sample: SampleInput) -> None:
    shutil.rmtree(table_of(options) / "_firnline")
    for path in commits_of(table_of(options), options.name):
        break_info(path)
    refuse(options, sample, "checkpoint-lost")


def test_whole_ledger_lost(options: PipelineOptions, sample: SampleInput) -> None:
    shutil.rmtree(table_of(options) / "_firnline")
    go_on(options, sample, hole=True)


def test_log_lost_while_the_ledger_stands(options: PipelineOptions, sample: SampleInput) -> None:
    shutil.rmtree(table_of(options) / "_delta_log")
    sample.add("z9.json", 3)
    run = run_once(options)
    assert run.exit_code == 1
    assert run.error_code == "checkpoint-lost"


def test_newer_format_is_refused_by_name(options: PipelineOptions, sample: SampleInput) -> None:
    from firnline.checkpoint.codec import canonical, checksum, parse, short_number

    entry = newest_entry(options)
    body = parse(entry.read_bytes(), "entry")
    body["format"] = 99
    entry.write_bytes(canonical(body))
    table = as_delta(open_pipeline(options).deciding).table
    number = short_number(checksum(entry.read_bytes()))
    from tests.support.damage import write_app_id  # noqa: F401  # the entry Txn is changed below

    assert table.refresh()
    table.append("delta.commit", [], "{}", {f"firnline-entry:{options.name}": number}, {}, onto=table.version)
    refuse(options, sample, "newer-format")


@pytest.mark.parametrize("epoch", range(8))
def test_rebuilt_only_on_the_one_before(options: PipelineOptions, epoch: int) -> None:
    """The reference to the entry before has no checksum of its own once the entry is damaged."""
    import json

    bench = Bench(options)
    break_info(newest_commit(options))
    body = json.loads(newest_entry(options).read_bytes())
    body["previous"] = {**body["previous"], "epoch": epoch, "checksum": "0" * 64}
    newest_entry(options).write_text(json.dumps(body))
    assert bench.find() in (bench.true, None)


# -- every byte ---------------------------------------------------------------------------------------


class Bench:
    """Finds the checkpoint of the newest epoch without delta-rs, whose own reading is not what is tested here."""

    def __init__(self, options: PipelineOptions) -> None:
        self.options = options
        pipeline = open_pipeline(options)
        storage = open_storage(options.sinks[0].location)
        sink = as_delta(pipeline.deciding)
        held = sink.load()
        self.digest = sink.table.txn(f"firnline-entry:{options.name}")
        self.version, self.epoch = held.version, held.epoch
        self.log, self.ledger, self.replay = DeltaLog(storage), Ledger(storage, options.name), pipeline.sources.replay
        self.true = self.facts(held.checkpoint)

    def facts(self, checkpoint: Checkpoint | None) -> Json:
        """What a position says, without what only saves time (byte offsets, counts of tries)."""
        assert checkpoint is not None
        position = checkpoint.positions["files"]
        return {
            "epoch": checkpoint.epoch,
            "attempt": checkpoint.attempt,
            "root": position["root"],
            "files": position["files"],
            "mark": position["last_committed_file"],
            "aside": sorted(position["set_aside"]),
        }

    def find(self) -> Json | None:
        """The facts that are found now; None when that is refused."""
        try:
            found = find_checkpoint(
                self.log, self.ledger, self.options.name, self.version, self.epoch, self.digest, self.replay
            )
        except CheckpointError:
            return None
        return self.facts(found.checkpoint)


Change = Callable[[bytes], object]


@pytest.mark.parametrize("change", [flips, cuts])
@pytest.mark.parametrize("epochs_back", [0, 2])
def test_every_byte_of_a_ledger_entry(options: PipelineOptions, change: Change, epochs_back: int) -> None:
    """With the copy in the log intact, every damage is repaired."""
    bench = Bench(options)
    path = ledger_files(table_of(options), options.name)[-1 - epochs_back]
    for at, damaged in change(path.read_bytes()):  # type: ignore[attr-defined]
        path.write_bytes(damaged)
        assert bench.find() == bench.true, at


@pytest.mark.parametrize("change", [flips, cuts])
def test_every_byte_of_a_ledger_entry_without_the_copy_in_the_log(options: PipelineOptions, change: Change) -> None:
    """Rebuilt to the same position, or refused."""
    bench = Bench(options)
    break_info(newest_commit(options))
    assert bench.find() == bench.true
    path = newest_entry(options)
    rebuilt = 0
    for at, damaged in change(path.read_bytes()):  # type: ignore[attr-defined]
        path.write_bytes(damaged)
        found = bench.find()
        assert found in (bench.true, None), at
        rebuilt += found is not None
    assert change is cuts or rebuilt > 0


@pytest.mark.parametrize("change", [flips, cuts])
def test_every_byte_of_the_copy_in_the_log(options: PipelineOptions, change: Change) -> None:
    bench = Bench(options)
    newest_entry(options).unlink()
    assert bench.find() == bench.true
    commit = newest_commit(options)
    for at, damaged in change(commit.read_bytes()):  # type: ignore[attr-defined]
        commit.write_bytes(damaged)
        assert bench.find() in (bench.true, None), at


@pytest.mark.parametrize("change", [flips, cuts])
def test_every_byte_of_an_interchange_payload(options: PipelineOptions, change: Change) -> None:
    app_id = DeltaLog(open_storage(options.sinks[0].location)).read(int(newest_commit(options).stem)).blizzard()  # type: ignore[union-attr]
    assert app_id is not None
    true = decode_blizzard(app_id)
    for at, damaged in change(app_id.removeprefix("blizzard:").encode()):  # type: ignore[attr-defined]
        try:
            found = decode_blizzard("blizzard:" + damaged.decode("latin-1"))
            assert {key: found.get(key) for key in true} == true, at  # a checksum of another name is one field more
        except CheckpointError:
            continue


def test_every_byte_of_a_fold(options: PipelineOptions, monkeypatch: pytest.MonkeyPatch) -> None:
    """A damaged fold is a hole, never another history."""
    monkeypatch.setattr("firnline.checkpoint.ledger.FOLD_ENTRIES", 2)
    pipeline = open_pipeline(options)
    held = pipeline.load()
    true = known_files(pipeline, held.entry)
    assert held.entry is not None
    assert pipeline.ledger.fold(held.entry, held.epoch) >= 2
    assert known_files(pipeline, held.entry) == true
    fold = next((table_of(options) / "_firnline" / options.name / "ledger").glob("fold-*"))
    for change in (flips, cuts):
        data = fold.read_bytes()
        for at, damaged in change(data):
            fold.write_bytes(damaged)
            try:
                assert known_files(pipeline, held.entry) == true, at
            except (LedgerHoleError, DamagedError):
                continue
        fold.write_bytes(data)


# -- a log that others use too ------------------------------------------------------------------------


def append_rows(options: PipelineOptions, times: int) -> None:
    import pyarrow as pa
    from deltalake import write_deltalake

    for _ in range(times):
        write_deltalake(str(table_of(options)), pa.table({"v": [0.5]}), mode="append", schema_mode="merge")


def test_idle_while_others_commit(options: PipelineOptions, sample: SampleInput) -> None:
    options = replace(options, checkpoint=replace(options.checkpoint, recovery_scan_commits=5))
    append_rows(options, 12)
    newest_entry(options).unlink()
    go_on(options, sample, hole=True)


def test_log_cleaned_up_by_retention(options: PipelineOptions, sample: SampleInput) -> None:
    append_rows(options, 3)
    DeltaTable(str(table_of(options))).create_checkpoint()
    for path in commit_files(table_of(options))[:-1]:
        path.unlink()
    go_on(options, sample)


def test_log_cleaned_up_and_entry_lost_is_refused(options: PipelineOptions, sample: SampleInput) -> None:
    append_rows(options, 3)
    DeltaTable(str(table_of(options))).create_checkpoint()
    for path in commit_files(table_of(options))[:-1]:
        path.unlink()
    newest_entry(options).unlink()
    refuse(options, sample, "checkpoint-lost")


def test_optimize_vacuum_delete_and_other_writers(options: PipelineOptions, sample: SampleInput) -> None:
    table = str(table_of(options))
    append_rows(options, 2)
    DeltaTable(table).optimize.compact()
    DeltaTable(table).vacuum(retention_hours=0, dry_run=False, enforce_retention_duration=False)
    gone = sorted(sample.ids)[:2]
    DeltaTable(table).delete(f"id in ({gone[0]}, {gone[1]})")
    for number in gone:
        del sample.ids[number]
    go_on(options, sample)
    assert run_once(options).result.epochs == 0


def test_restore_by_a_user(options: PipelineOptions, sample: SampleInput) -> None:
    """Rows that a restore took back stay away; epochs go on growing."""
    table = str(table_of(options))
    before = open_pipeline(options).load().epoch
    early = int(commits_of(table, options.name)[0].stem)
    DeltaTable(table).restore(early)
    kept = table_ids(table)
    assert kept != sample.ids
    sample.ids = kept
    go_on(options, sample)
    assert open_pipeline(options).load().epoch == before + 1


def test_two_pipelines_into_one_table(options: PipelineOptions, sample: SampleInput, tmp_path: Path) -> None:
    other_input = SampleInput(tmp_path / "in2")
    other_input._next = iter(range(1_000_000, 2_000_000))  # type: ignore[assignment]
    other = replace(options, name="other", sources=(replace(file_source(options), path=str(other_input.folder)),))
    for turn in range(3):
        sample.add(f"m{turn}.json", 3)
        other_input.add(f"n{turn}.json", 3)
        assert run_once(options).exit_code == 0
        assert run_once(other).exit_code == 0
    assert table_ids(table_of(options)) == sample.ids + other_input.ids
    assert open_pipeline(other).load().epoch == 3


def test_nothing_to_do_writes_nothing(options: PipelineOptions) -> None:
    def stored() -> dict[str, int]:
        return {str(p): p.stat().st_mtime_ns for p in table_of(options).rglob("*") if p.is_file()}

    before = stored()
    assert run_once(options).exit_code == 0
    assert stored() == before
