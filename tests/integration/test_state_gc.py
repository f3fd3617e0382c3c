"""Sweeping of state: what nothing can need goes, and one may still go back to every epoch that one may go back to."""

from __future__ import annotations

import json
import os
import shutil
import socket
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from firnline.checkpoint.codec import canonical, seal
from firnline.cli.main import run_command
from firnline.errors import CheckpointError, LedgerHoleError, StateIncompleteError
from firnline.faults import InjectedFaultError
from firnline.history.edits.rollback import Rollback
from firnline.maintenance.gc import gc
from firnline.maintenance.state import StateSwept, find_needed, sweep_state
from firnline.options import (
    LocalTierOptions,
    PipelineOptions,
    RemoteTierOptions,
    StoreOptions,
    TriggerOptions,
)
from firnline.run.open_pipeline import open_pipeline
from firnline.sinks.delta.options import DeltaSinkOptions
from firnline.spec.build import load_options
from firnline.state.remote import Replica
from tests.support.keyed import KeyedInput, answers, answers_without_trouble, keyed_options, run_each_epoch
from tests.support.pipelines import run_to_end, state_folder

SPEC = """\
name: demo
sources:
  files:
    path: in
    schema: {fields: [{name: k, type: string}, {name: v, type: int64}, {name: at, type: timestamp}]}
operators:
  - name: totals
    type: aggregate
    inputs: [files]
    keys: [k]
    aggregates: [{name: n, function: count}, {name: total, function: sum, column: v}]
sinks:
  - {type: delta, name: delta, table: out, input: totals, write: upsert}
state: {shards: 2}
batch: {max_files: 1}
checkpoint: {rollback_window: 2, keep_checkpoints: 1}
"""


def options_of(folder: Path, **settings: Any) -> PipelineOptions:
    return keyed_options(folder, **{"rollback_window": 2, "keep_checkpoints": 0, "keep_aborted_secs": 0.0, **settings})


def complete(folder: Path) -> list[int]:
    """The epochs of the complete checkpoints in a home."""
    return sorted(int(path.parent.name[:20]) for path in folder.glob("*/COMMITTED"))


def files(folder: Path) -> set[str]:
    return {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()}


def sweep(options: PipelineOptions, **settings: Any) -> list[StateSwept]:
    return sweep_state(open_pipeline(options), **{"grace_seconds": 0, **settings})


def record_run(table: Path, **changes: Any) -> None:
    """Make the newest run's record say something else."""
    # By generation: runs of the same second have names in any order.
    path = max((table / "_firnline/demo/runs").iterdir(), key=lambda p: int(json.loads(p.read_bytes())["generation"]))
    body = {k: v for k, v in json.loads(path.read_bytes()).items() if k not in ("checksum", "format")}
    path.write_bytes(canonical(seal({**body, **changes})))


ALIVE = {"status": "running", "host": socket.gethostname(), "pid": os.getpid()}


def test_what_lies_below_the_floor_goes_and_one_may_go_back_to_all_that_is_left(
    tmp_path: Path, keyed: KeyedInput
) -> None:
    options = options_of(tmp_path)
    run_each_epoch(keyed, options, 8)
    checkpoint = open_pipeline(options).load().checkpoint
    assert checkpoint is not None
    floor = checkpoint.floor
    assert 0 < floor < 8
    before = files(state_folder(options))
    (planned,) = sweep(options, dry_run=True)
    assert files(state_folder(options)) == before
    (swept,) = sweep(options)
    assert replace(planned, dry_run=False) == swept
    assert swept.files == len(before) - len(files(state_folder(options))) > 0
    assert complete(state_folder(options)) == list(range(floor, 9))
    assert swept.kept == 9 - floor
    assert all(not Rollback(open_pipeline(options), to).plan().refusals for to in range(floor, 8))
    assert sweep(options)[0].files == 0
    Rollback(open_pipeline(options), floor).perform("test")
    run_to_end(options)
    assert answers(options.deciding.location) == answers_without_trouble(tmp_path, options)


def test_young_files_and_the_newest_checkpoints_stay(tmp_path: Path, keyed: KeyedInput) -> None:
    options = options_of(tmp_path, keep_checkpoints=6)
    run_each_epoch(keyed, options, 8)
    assert sweep(options, grace_seconds=3600)[0].files == 0
    sweep(options)
    assert complete(state_folder(options)) == [3, 4, 5, 6, 7, 8]


def test_what_a_sparse_snapshot_is_followed_by_stays(tmp_path: Path, keyed: KeyedInput) -> None:
    options = options_of(tmp_path, trigger=TriggerOptions(every_epochs=5))
    run_each_epoch(keyed, options, 9)  # snapshots after 1 and 6
    sweep(options)
    run_each_epoch(keyed, options, 3)
    assert answers(options.deciding.location) == answers_without_trouble(tmp_path, options)


def test_a_rollback_keeps_the_older_state_that_it_stands_on(tmp_path: Path, keyed: KeyedInput) -> None:
    options = options_of(tmp_path, rollback_window=6)
    run_each_epoch(keyed, options, 5)
    Rollback(open_pipeline(options), 1).perform("test")
    for _ in range(2):
        sweep(options)
        assert 1 in complete(state_folder(options))
    run_to_end(options)
    assert answers(options.deciding.location) == answers_without_trouble(tmp_path, options)


def test_a_sink_that_lags_keeps_what_its_epoch_names(
    tmp_path: Path, keyed: KeyedInput, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = DeltaSinkOptions("delta", str(tmp_path / "out"), input="totals", write="upsert")
    second = DeltaSinkOptions("copy", str(tmp_path / "two"), input="totals", write="upsert", required=False)
    options = options_of(tmp_path, sinks=(first, second), commit_policy="required")
    run_each_epoch(keyed, options, 6)
    pipeline = open_pipeline(options)
    entries = {entry.epoch: entry for entry in pipeline.entries(pipeline.load().entry)}
    before = find_needed(pipeline).marks
    lagging = replace(pipeline.sinks[1].load(), epoch=1)
    monkeypatch.setattr(
        type(pipeline.sinks[1]), "load", lambda sink: lagging if sink.name == "copy" else pipeline.load()
    )
    monkeypatch.setattr(type(pipeline), "load", lambda _: type(pipeline.sinks[0]).load_committed(pipeline.sinks[0]))
    marks = find_needed(pipeline).marks
    assert entries[1].checkpoint.state["totals"]["checkpoint"] in set(marks.ids) - set(before.ids)
    assert marks.keep_from_epoch <= 1


def test_versions_of_the_store_and_of_the_tiers_are_marked(tmp_path: Path, keyed: KeyedInput) -> None:
    options = options_of(
        tmp_path,
        store=StoreOptions(path=str(tmp_path / "store")),
        local=LocalTierOptions(str(tmp_path / "local"), interval_ms=1),
        remote=RemoteTierOptions(str(tmp_path / "remote"), interval_ms=1),
    )
    run_each_epoch(keyed, options, 6)
    pipeline = open_pipeline(options)
    since = {store.tier: [r.epoch for r in store.load_since(3)] for store in pipeline.recorder.stores}
    assert since["store"] == [6, 5, 4, 3]
    assert since["local"][0] == since["remote"][0] == 6
    assert min(since["local"] + since["remote"]) >= 3
    shutil.rmtree(tmp_path / "store")
    (tmp_path / "store").write_text("an outage")
    assert any("store" in note for note in find_needed(open_pipeline(options)).notes)


# -- what stops a sweep -----------------------------------------------------------------------------------


def test_a_hole_in_the_ledger_stops_it(tmp_path: Path, keyed: KeyedInput) -> None:
    options = options_of(tmp_path, rollback_window=6)
    run_each_epoch(keyed, options, 8)
    (entry,) = (tmp_path / "out/_firnline/demo/ledger").glob(f"{6:020d}-*")
    entry.unlink()
    before = files(state_folder(options))
    with pytest.raises(LedgerHoleError):
        sweep(options)
    assert files(state_folder(options)) == before


def test_a_pin_that_cannot_be_read_stops_it(tmp_path: Path, keyed: KeyedInput) -> None:
    options = options_of(tmp_path)
    run_each_epoch(keyed, options, 6)
    pin = tmp_path / "out/_firnline/pins/savepoint-0123456789abcdef.json"
    pin.parent.mkdir(parents=True)
    pin.write_text("{")
    before = files(state_folder(options))
    with pytest.raises(CheckpointError, match="pin"):
        sweep(options)
    assert files(state_folder(options)) == before


def test_damage_in_what_the_newest_epoch_names_stops_it(tmp_path: Path, keyed: KeyedInput) -> None:
    options = options_of(tmp_path)
    run_each_epoch(keyed, options, 6)
    (committed,) = state_folder(options).glob(f"{6:020d}-*/COMMITTED")
    committed.unlink()
    before = files(state_folder(options))
    with pytest.raises(StateIncompleteError):
        sweep(options)
    assert files(state_folder(options)) == before


def test_before_the_first_commit_nothing_goes(tmp_path: Path, keyed: KeyedInput) -> None:
    options = options_of(tmp_path)
    assert [one.files for one in sweep(options)] == [0]
    left = state_folder(options) / f"{1:020d}-abc" / "shard_0" / "totals.abc.arrow"
    left.parent.mkdir(parents=True)
    left.write_bytes(b"of an epoch in flight")
    sweep(options)
    assert left.exists()


@pytest.mark.parametrize("side", ["before", "after"])
def test_broken_off_anywhere_it_is_ended_by_the_next_one(
    tmp_path: Path, keyed: KeyedInput, monkeypatch: pytest.MonkeyPatch, side: str
) -> None:
    options = options_of(tmp_path)
    run_each_epoch(keyed, options, 6)
    shutil.copytree(tmp_path / "out", tmp_path / "kept")
    deletions = sweep(options)[0].files
    ended = files(state_folder(options))
    assert deletions > 3
    for count in range(1, deletions + 1):
        shutil.rmtree(tmp_path / "out")
        shutil.copytree(tmp_path / "kept", tmp_path / "out")
        monkeypatch.setattr("firnline.faults._seen", type(__import__("firnline.faults").faults._seen)())
        monkeypatch.setenv("FIRNLINE_FAULT", f"state.sweep.{side}:{count}:raise")
        with pytest.raises(Exception, match="injected fault") as caught:
            sweep(options)
        assert isinstance(caught.value.__cause__ or caught.value, InjectedFaultError)
        monkeypatch.delenv("FIRNLINE_FAULT")
        sweep(options)
        assert files(state_folder(options)) == ended, count
    run_each_epoch(keyed, options, 1)
    assert answers(options.deciding.location) == answers_without_trouble(tmp_path, options)


# -- the remote tier --------------------------------------------------------------------------------------


@pytest.fixture
def tiered(tmp_path: Path, keyed: KeyedInput) -> PipelineOptions:
    """Seven epochs, all of whose state lies in the home and in the remote tier."""
    options = options_of(tmp_path, local=LocalTierOptions(str(tmp_path / "local"), interval_ms=1))
    run_each_epoch(keyed, options, 7)
    shutil.copytree(state_folder(options), tmp_path / "remote/state/demo")
    remote = RemoteTierOptions(str(tmp_path / "remote"), interval_ms=1)
    return replace(options, checkpoint=replace(options.checkpoint, remote=remote))


def test_the_remote_tier_is_swept_while_no_run_is_at_work(tmp_path: Path, tiered: PipelineOptions) -> None:
    remote = tmp_path / "remote/state/demo"
    record_run(tmp_path / "out", **ALIVE)
    _, left = sweep(tiered)
    assert (left.tier, left.files) == ("remote", 0)
    assert "a run may be copying there" in left.notes[0]
    record_run(tmp_path / "out", status="done")
    _, swept = sweep(tiered)
    assert swept.files > 0
    assert complete(remote) == complete(state_folder(tiered))


def test_the_run_sweeps_the_remote_tier_through_its_replica(tmp_path: Path, tiered: PipelineOptions) -> None:
    record_run(tmp_path / "out", **ALIVE)
    place = open_pipeline(tiered).state_home
    assert place.fallback is not None
    _, swept = sweep(tiered, replica=Replica(place.storage, place.fallback.storage))
    assert (swept.files > 0, swept.notes) == (True, ())


def test_what_only_the_remote_tier_has_does_not_stop_the_home(
    tmp_path: Path, keyed: KeyedInput, tiered: PipelineOptions
) -> None:
    shutil.rmtree(state_folder(tiered))
    run_each_epoch(keyed, tiered, 1)
    swept, _ = sweep(tiered)
    assert any("remote tier alone" in note for note in swept.notes)
    floor = open_pipeline(tiered).load().checkpoint.floor  # type: ignore[union-attr]  # there are epochs
    assert not Rollback(open_pipeline(tiered), floor).plan().refusals
    Rollback(open_pipeline(tiered), floor).perform("test")
    run_to_end(tiered)
    assert answers(tiered.deciding.location) == answers_without_trouble(tmp_path, tiered)


# -- rows on their way ------------------------------------------------------------------------------------


def test_rows_on_their_way_go_an_hour_after_their_run_has_died(tmp_path: Path, keyed: KeyedInput) -> None:
    options = options_of(tmp_path)
    run_each_epoch(keyed, options, 1)
    left = tmp_path / "out/_firnline/demo/exchange/0123456789abcdef"
    left.mkdir(parents=True)
    old, young = left / "old.arrow", left / "young.arrow"
    for path, age in ((old, 3700), (young, 3500)):
        path.write_bytes(b"rows")
        os.utime(path, (time.time() - age,) * 2)
    record_run(tmp_path / "out", **ALIVE)
    assert "exchange" not in gc(options.deciding.location).kinds
    record_run(tmp_path / "out", status="done")
    assert gc(options.deciding.location, dry_run=True).kinds["exchange"].files == 1
    assert old.exists()
    assert gc(options.deciding.location).kinds["exchange"].files == 1
    assert (old.exists(), young.exists()) == (False, True)


# -- the command ------------------------------------------------------------------------------------------


def test_the_command_shows_and_performs_it(
    tmp_path: Path, keyed: KeyedInput, capsys: pytest.CaptureFixture[str]
) -> None:
    spec = tmp_path / "firnline.yml"
    spec.write_text(SPEC)
    options = load_options(spec, environ={})
    run_each_epoch(keyed, options, 7)
    before = files(state_folder(options))
    assert run_command(["gc", str(spec), "--grace", "0s", "--dry-run"]) == 0
    shown = capsys.readouterr().out
    assert f"state in {state_folder(options)}" in shown
    assert "would delete" in shown
    assert "add --yes" in shown
    assert files(state_folder(options)) == before
    assert run_command(["gc", str(spec), "--grace", "0s", "--yes", "--json"]) == 0
    (state,) = json.loads(capsys.readouterr().out)["state"]
    assert state["tier"] == "home"
    assert state["files"] == len(before) - len(files(state_folder(options))) > 0
    (newest,) = state_folder(options).glob(f"{7:020d}-*/COMMITTED")
    newest.unlink()
    assert run_command(["gc", str(spec), "--grace", "0s", "--yes"]) == 0
    assert "the state was left alone" in capsys.readouterr().out


def test_a_table_alone_says_nothing_of_state(
    tmp_path: Path, keyed: KeyedInput, capsys: pytest.CaptureFixture[str]
) -> None:
    options = options_of(tmp_path)
    run_each_epoch(keyed, options, 5)
    before = files(state_folder(options))
    assert run_command(["gc", options.deciding.location, "--grace", "0s", "--yes", "--json"]) == 0
    assert "state" not in json.loads(capsys.readouterr().out)
    assert files(state_folder(options)) == before
