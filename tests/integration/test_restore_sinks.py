"""Further sinks in a restore: rows of others and files that are gone, before the decision and after a kill."""

from __future__ import annotations

import base64
import json
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from deltalake import CommitProperties, DeltaTable, Transaction, write_deltalake

import firnline.history.edits.restore as restoring
from firnline.errors import RollbackRefusedError
from firnline.history.edits.restore import Restored, restore_savepoint
from firnline.history.edits.restore_plan import copy_ledger
from firnline.history.edits.rollback import Rollback
from firnline.history.savepoints.create import create_savepoint
from firnline.options import PipelineOptions
from firnline.run import edits, joining
from firnline.run.open_pipeline import open_pipeline
from firnline.sinks.delta.history_edit import find_owners
from firnline.sinks.delta.log import encode_blizzard
from firnline.sinks.delta.options import DeltaSinkOptions
from tests.support.pipelines import MakeOptions, make_epochs, run_once, run_to_end
from tests.support.samples import SampleInput, table_ids

STATE: dict[str, Any] = {"files": {}, "last_committed_file": None}


def restore(options: PipelineOptions, path: str, **settings: Any) -> Restored:
    return restore_savepoint(open_pipeline(options), path, "test", **settings)


def write_as(table: str, app_id: str | None = None) -> None:
    """A row of somebody else, with a transaction id of theirs or by hand."""
    properties = CommitProperties(app_transactions=[Transaction(app_id, 1)]) if app_id else None
    row = pa.table({"id": [-1], "month": ["2026-01"], "v": [0.5]})
    write_deltalake(table, row, mode="append", commit_properties=properties)


def vacuum(table: str) -> None:
    """As another tool does it, which knows of no pins."""
    DeltaTable(table).vacuum(retention_hours=0, enforce_retention_duration=False, dry_run=False)


@pytest.fixture
def options(make_options: MakeOptions, tmp_path: Path) -> PipelineOptions:
    sinks = (DeltaSinkOptions("main", str(tmp_path / "one")), DeltaSinkOptions("copy", str(tmp_path / "two")))
    return make_options(max_files=1, sinks=sinks)


@pytest.fixture(params=["version", "copies"])
def saved(request: pytest.FixtureRequest, sample: SampleInput, options: PipelineOptions, tmp_path: Path) -> str:
    """A savepoint of epoch 2, with copies, of tables at epoch 3; restored over the log, or by copying."""
    make_epochs(sample, options, 2)
    create_savepoint(open_pipeline(options), str(tmp_path / "saved"), copy=True)
    make_epochs(sample, options, 1, first=3)
    for sink in options.sinks:
        DeltaTable(sink.location).optimize.compact()
        if request.param == "copies":
            vacuum(sink.location)
    return str(tmp_path / "saved")


@contextmanager
def dies_after_the_decision(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    def die(*_: Any) -> int:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(edits, "settle_edits", die)
        with pytest.raises(KeyboardInterrupt):
            yield


def once_before(original: Callable[..., Any], act: Callable[[], None]) -> Callable[..., Any]:
    acted: list[bool] = []

    def wrapped(*arguments: Any, **settings: Any) -> Any:
        if not acted:
            acted.append(True)
            act()
        return original(*arguments, **settings)

    return wrapped


# -- rows of others -------------------------------------------------------------------------------------


@pytest.mark.parametrize("app_id", [None, "reports"])
def test_rows_that_come_after_the_plan_are_seen_before_the_decision(
    options: PipelineOptions, saved: str, monkeypatch: pytest.MonkeyPatch, app_id: str | None
) -> None:
    main, copy = (sink.location for sink in options.sinks)
    before = table_ids(main)
    with monkeypatch.context() as patch:
        patch.setattr(restoring, "copy_ledger", once_before(copy_ledger, lambda: write_as(copy, app_id)))
        with pytest.raises(RollbackRefusedError, match="copy: others changed rows since the restore was planned"):
            restore(options, saved)
    assert table_ids(main) == before, "nothing was decided"
    assert table_ids(copy)[-1] == 1
    run_to_end(options)


@pytest.mark.parametrize("moment", ["decided", "checked", "looked"])
def test_rows_that_come_after_the_decision_are_not_lost(
    sample: SampleInput, options: PipelineOptions, saved: str, monkeypatch: pytest.MonkeyPatch, moment: str
) -> None:
    """Before the sink is checked for rows of others, right after that check, and before its commit."""
    copy = options.sinks[1].location
    pipeline = open_pipeline(options)
    told: list[str] = []
    if moment == "decided":
        monkeypatch.setattr(
            pipeline.ledger, "stage", once_before(pipeline.ledger.stage, lambda: write_as(copy, "reports"))
        )
    elif moment == "checked":
        check = joining.check_unchanged
        late = once_before(lambda: None, lambda: write_as(copy, "reports"))

        def check_then_write(*arguments: Any) -> None:
            check(*arguments)
            if pipeline.sinks[0].load().epoch == arguments[1].epoch:
                late()

        monkeypatch.setattr(joining, "check_unchanged", check_then_write)
    else:
        sink = pipeline.sinks[1]
        monkeypatch.setattr(sink, "edit", once_before(sink.edit, lambda: write_as(copy, "reports")))
    restore_savepoint(pipeline, saved, "test", report=told.append)
    assert any("copy follows when the next run joins it: copy: others changed rows" in line for line in told)
    assert table_ids(copy)[-1] == 1
    check_ways_out(sample, options, saved, "reports")


@pytest.mark.parametrize("app_id", [None, "reports"])
def test_rows_that_come_between_a_kill_and_the_next_run_are_not_lost(
    sample: SampleInput, options: PipelineOptions, saved: str, monkeypatch: pytest.MonkeyPatch, app_id: str | None
) -> None:
    with dies_after_the_decision(monkeypatch):
        restore(options, saved)
    write_as(options.sinks[1].location, app_id)
    check_ways_out(sample, options, saved, app_id or "WRITE")


def check_ways_out(sample: SampleInput, options: PipelineOptions, saved: str, name: str) -> None:
    """The run is refused, so is the same restore; with --accept it is made again."""
    copy = options.sinks[1].location
    run = run_once(options)
    assert run.error_code == "rollback-refused", run.result
    assert run.result.error is not None
    assert f"firnline run --from-savepoint {saved} --accept {name}" in run.result.error.hint
    with pytest.raises(RollbackRefusedError) as caught:
        restore(options, saved)
    assert f"--accept {name}" in caught.value.hint
    assert table_ids(copy)[-1] == 1
    again = restore(options, saved, accept=[name])
    assert not again.already
    assert restore(options, saved).already
    run_to_end(options)
    for sink in options.sinks:
        assert table_ids(sink.location) == sample.ids


@pytest.mark.parametrize("saved", ["version"], indirect=True)
def test_a_sink_with_rows_of_others_can_be_left_as_it_is(
    sample: SampleInput, options: PipelineOptions, saved: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with dies_after_the_decision(monkeypatch):
        restore(options, saved)
    main, copy = (sink.location for sink in options.sinks)
    write_as(copy, "reports")
    run = run_once(options)
    assert run.result.error is not None
    assert "firnline rollback --to 2 --leave copy" in run.result.error.hint
    Rollback(open_pipeline(options), 2, leave=["copy"]).perform("test")
    run_to_end(options)
    assert table_ids(main) == sample.ids
    assert table_ids(copy)[-1] == 1


# -- files that are gone --------------------------------------------------------------------------------


@pytest.mark.parametrize("saved", ["version"], indirect=True)
def test_a_vacuum_after_a_kill_does_not_block_the_pipeline(
    sample: SampleInput, options: PipelineOptions, saved: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with dies_after_the_decision(monkeypatch):
        restore(options, saved)
    vacuum(options.sinks[1].location)
    run = run_once(options)
    assert run.error_code == "rollback-refused", run.result
    assert run.result.error is not None
    assert "file(s) that it needs are gone" in run.result.error.message
    assert f"firnline run --from-savepoint {saved}" in run.result.error.hint
    told: list[str] = []
    again = restore(options, saved, report=told.append)
    assert not again.already
    assert again.copied_bytes > 0
    assert any(line.endswith("restoring once more") for line in told)
    run_to_end(options)
    for sink in options.sinks:
        assert table_ids(sink.location) == sample.ids


@pytest.mark.parametrize("saved", ["copies"], indirect=True)
def test_copies_that_are_deleted_after_a_kill_are_made_again(
    sample: SampleInput, options: PipelineOptions, saved: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    copy = options.sinks[1].location
    with dies_after_the_decision(monkeypatch):
        restore(options, saved)
    named = {os.path.basename(uri) for uri in DeltaTable(copy).file_uris()}
    for path in Path(copy).glob("*.parquet"):
        if path.name not in named:
            path.unlink()
    assert run_once(options).error_code == "rollback-refused"
    assert not restore(options, saved).already
    run_to_end(options)
    for sink in options.sinks:
        assert table_ids(sink.location) == sample.ids


def test_without_copies_the_sink_is_left_as_it_is(
    sample: SampleInput, options: PipelineOptions, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_epochs(sample, options, 2)
    create_savepoint(open_pipeline(options), str(tmp_path / "saved"))
    make_epochs(sample, options, 1, first=3)
    main, copy = (sink.location for sink in options.sinks)
    DeltaTable(copy).optimize.compact()
    with dies_after_the_decision(monkeypatch):
        restore(options, str(tmp_path / "saved"))
    vacuum(copy)
    run = run_once(options)
    assert run.error_code == "rollback-refused", run.result
    assert run.result.error is not None
    assert "firnline rollback --to 2 --leave copy" in run.result.error.hint
    with pytest.raises(RollbackRefusedError, match="are gone from"):
        restore(options, str(tmp_path / "saved"))
    Rollback(open_pipeline(options), 2, leave=["copy"]).perform("test")
    run_to_end(options)
    assert table_ids(main) == sample.ids
    assert all(count >= 1 for count in table_ids(copy).values())


@pytest.mark.parametrize("saved", ["version"], indirect=True)
@pytest.mark.parametrize("moment", ["planned", "looked"])
@pytest.mark.parametrize("which", [0, 1])
def test_a_vacuum_between_plan_and_commit_is_told_as_such(
    sample: SampleInput,
    options: PipelineOptions,
    saved: str,
    monkeypatch: pytest.MonkeyPatch,
    which: int,
    moment: str,
) -> None:
    table = options.sinks[which].location
    pipeline = open_pipeline(options)
    with monkeypatch.context() as patch:
        if moment == "planned":
            patch.setattr(restoring, "copy_ledger", once_before(copy_ledger, lambda: vacuum(table)))
        else:
            target = pipeline.sinks[which]
            patch.setattr(target, "edit", once_before(target.edit, lambda: vacuum(table)))
        told: list[str] = []
        try:
            restore_savepoint(pipeline, saved, "test", report=told.append)
        except RollbackRefusedError as error:
            told.append(error.message)
    assert any("file(s)" in line and ("are gone" in line or "were deleted" in line) for line in told), told
    assert restore(options, saved).copied_bytes > 0
    run_to_end(options)
    for sink in options.sinks:
        assert table_ids(sink.location) == sample.ids


# -- who is a stranger ----------------------------------------------------------------------------------


def test_only_our_very_own_ids_are_ours() -> None:
    ours = [f"firnline{part}:demo" for part in ("", "-gen", "-entry", "-tip", "-tip-epoch")]
    ours += ["firnline-committer", "firnline-unit:abc", encode_blizzard(STATE, 3, {"pipeline": "demo"})]
    assert find_owners(ours, "demo") == []
    theirs = ["firnline:other", "firnline-gen:other", encode_blizzard(STATE, 3, {"pipeline": "other"})]
    assert find_owners([*ours, *theirs], "demo") == ["other"]
    odd = ["blizzard:other", "firnline_reports", "firnline-reports", "firnlinedemo", "demo", "reports"]
    assert find_owners(odd, "demo") == odd
    tool = "blizzard:" + base64.b64encode(json.dumps({"schema_version": 1, "source_state": STATE}).encode()).decode()
    assert find_owners([tool], "demo") == ["blizzard"]


@pytest.mark.parametrize("app_id", ["blizzard:other", "firnline_reports"])
@pytest.mark.parametrize("which", [0, 1])
def test_names_like_ours_are_strangers(
    sample: SampleInput, options: PipelineOptions, tmp_path: Path, app_id: str, which: int
) -> None:
    make_epochs(sample, options, 2)
    saved = str(tmp_path / "saved")
    create_savepoint(open_pipeline(options), saved)
    make_epochs(sample, options, 1, first=3)
    write_as(options.sinks[which].location, app_id)
    with pytest.raises(RollbackRefusedError) as caught:
        restore(options, saved)
    assert f"--accept {app_id}" in caught.value.hint
    with pytest.raises(RollbackRefusedError) as caught:
        Rollback(open_pipeline(options), 2).perform("test")
    assert f"--accept {app_id}" in caught.value.hint
    assert table_ids(options.sinks[which].location)[-1] == 1
    restore(options, saved, accept=[app_id])
    run_to_end(options)
    for sink in options.sinks:
        assert table_ids(sink.location) == sample.ids
