"""Each guard of a commit is tried alone: what stands behind it does not catch what is done here."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from deltalake import DeltaTable, write_deltalake

from firnline.errors import CommitConflictError, FencedError
from firnline.options import PipelineOptions
from firnline.run.open_pipeline import open_pipeline
from firnline.sinks.delta.sink import DeltaSink, as_delta
from firnline.sinks.delta.table import Table
from firnline.sinks.staged.sink import StagedDeltaSink
from firnline.storage import LocalStorage
from tests.support.committers import commit_table, pending_units
from tests.support.pipelines import LocalRun, MakeOptions, make_epochs, run_once, run_to_end
from tests.support.samples import SampleInput, table_ids


def before(patch: pytest.MonkeyPatch, cls: type, method: str, act: Callable[[Any], object]) -> list[str]:
    """Do something before the first call of a method; what was met is told."""
    met: list[str] = []
    original = getattr(cls, method)

    def hooked(self: Any, *arguments: Any, **named: Any) -> Any:
        if not met:
            met.append(method)
            act(self)
        return original(self, *arguments, **named)

    patch.setattr(cls, method, hooked)
    return met


def txn(options: PipelineOptions, part: str) -> int | None:
    return DeltaTable(options.deciding.location).transaction_version(f"firnline{part}:demo")


def fenced(run: LocalRun) -> None:
    assert (run.exit_code, run.error_code) == (5, "fenced"), run.result


@pytest.mark.parametrize("mode", ["direct", "staged"])
def test_a_bare_claim_fences_the_run_before_it(
    sample: SampleInput, make_options: MakeOptions, monkeypatch: pytest.MonkeyPatch, mode: str
) -> None:
    """The successor has committed nothing yet: epoch and entry are those that the run before it expects."""
    options = make_options(max_files=1, mode=mode)
    make_epochs(sample, options, 1)
    if mode == "staged":
        commit_table(options.deciding.location)
    sample.add("g.json", 3)
    cls = StagedDeltaSink if mode == "staged" else DeltaSink
    met = before(monkeypatch, cls, "commit", lambda _: open_pipeline(options).deciding.claim("successor"))
    fenced(run_once(options))
    assert met
    assert txn(options, "-gen") == 3
    assert not pending_units(options.deciding.location), "a run that is fenced puts no unit"
    monkeypatch.undo()
    run_to_end(options)
    if mode == "staged":
        commit_table(options.deciding.location)
    assert table_ids(options.deciding.location) == sample.ids


def test_a_claim_between_the_look_and_the_put_fences_the_writer(
    sample: SampleInput, make_options: MakeOptions, monkeypatch: pytest.MonkeyPatch
) -> None:
    options = make_options(max_files=1, mode="staged")
    make_epochs(sample, options, 1)
    commit_table(options.deciding.location)
    sample.add("g.json", 3)
    claimed: list[int] = []
    put = LocalStorage.put

    def hooked(self: LocalStorage, key: str, data: bytes) -> None:
        if "_staging/pending/" in key and not claimed:
            claimed.append(open_pipeline(options).deciding.claim("successor").generation)
        put(self, key, data)

    monkeypatch.setattr(LocalStorage, "put", hooked)
    fenced(run_once(options))
    assert claimed == [3]
    run_to_end(options)
    commit_table(options.deciding.location)
    assert table_ids(options.deciding.location) == sample.ids


def test_an_epoch_follows_its_entry_not_only_its_number(
    sample: SampleInput, make_options: MakeOptions, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The table holds another epoch of the same number, under the same generation: another history."""
    options = make_options(max_files=1)
    make_epochs(sample, options, 1)
    sample.add("g.json", 3)

    def change(sink: DeltaSink) -> None:
        table = Table(sink.table.uri, {})
        assert table.refresh()
        table.append("delta.commit", [], "{}", {"firnline-entry:demo": 12345}, {}, onto=table.version)

    met = before(monkeypatch, DeltaSink, "commit", change)
    fenced(run_once(options))
    assert met
    assert (txn(options, ""), txn(options, "-entry")) == (1, 12345)


def test_a_receipt_of_another_attempt_is_not_ours(
    sample: SampleInput, make_options: MakeOptions, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After a conflict the table holds the epoch, by another attempt at it."""
    options = make_options(max_files=1)
    make_epochs(sample, options, 1)
    sample.add("g.json", 3)
    append = Table.append
    told: list[str] = []

    def other_first(self: Table, point: str, files: Any, info: str, *arguments: Any, **named: Any) -> int:
        if point == "delta.commit" and not told:
            checkpoint = json.loads(info)["checkpoint"]
            told.append(checkpoint["attempt"])
            for text in (checkpoint["attempt"], checkpoint["checksum"]):
                info = info.replace(text, "f" * len(text))
            append(self, point, [], info, *arguments, **named)
            raise CommitConflictError("the version was taken")
        return append(self, point, files, info, *arguments, **named)

    receipts: list[str] = []
    commit = DeltaSink.commit

    def noted(self: DeltaSink, *arguments: Any) -> Any:
        receipt = commit(self, *arguments)
        receipts.append(receipt.attempt)
        return receipt

    monkeypatch.setattr(Table, "append", other_first)
    monkeypatch.setattr(DeltaSink, "commit", noted)
    fenced(run_once(options))
    assert told
    assert not receipts


@pytest.mark.parametrize("commits", [False, True])
def test_a_table_that_another_run_creates_first_is_not_ours(
    sample: SampleInput, make_options: MakeOptions, monkeypatch: pytest.MonkeyPatch, commits: bool
) -> None:
    """Both claimed a table that did not exist, so both hold generation 1: who creates it owns it."""
    options = make_options(max_files=1)
    sample.add("a.json", 3)

    def create(_: Any) -> None:
        if commits:
            run_to_end(options)
            return
        other = as_delta(open_pipeline(options).deciding)
        other.claim("other")
        other._table.create(pa.schema([("id", pa.int64())]), [], other._info("create"), {"firnline-gen:demo": 1})

    met = before(monkeypatch, DeltaSink, "_create", create)
    fenced(run_once(options))
    assert met
    assert txn(options, "") == (1 if commits else None)
    monkeypatch.undo()
    run_to_end(options)
    assert table_ids(options.deciding.location) == sample.ids


def test_a_repeated_commit_is_recognised_by_its_checkpoint(sample: SampleInput, make_options: MakeOptions) -> None:
    """Another checkpoint under the same number is another epoch, whoever asks."""
    options = make_options(max_files=1)
    make_epochs(sample, options, 1)
    pipeline = open_pipeline(options)
    held = pipeline.deciding.load()
    assert held.checkpoint is not None
    assert held.entry is not None
    pipeline.deciding.claim("test")
    from firnline.run.commits import entry_commit

    entry = next(pipeline.entries(held.entry))
    commit = entry_commit(pipeline, pipeline.deciding, entry, held.entry, pa.schema([]))
    assert pipeline.deciding.commit(commit).attempt == held.attempt, "a repeat returns the first receipt"
    other = replace(commit, checkpoint=replace(commit.checkpoint, attempt="f" * 16))
    with pytest.raises(FencedError):
        pipeline.deciding.commit(other)


# -- a table that is lost while a run goes on ---------------------------------------------------------


def test_a_table_that_is_lost_between_check_and_write_gets_no_second_log(
    sample: SampleInput, make_options: MakeOptions, monkeypatch: pytest.MonkeyPatch
) -> None:
    options = make_options(max_files=1)
    table = Path(options.deciding.location)
    make_epochs(sample, options, 1)
    sample.add("g.json", 3)
    met = before(monkeypatch, DeltaSink, "_append", lambda _: shutil.rmtree(table / "_delta_log"))
    run = run_once(options)
    assert met
    assert (run.exit_code, run.error_code) == (1, "table-lost")
    assert not list(table.glob("_delta_log/*.json"))


@pytest.mark.parametrize("mode", ["direct", "staged"])
@pytest.mark.parametrize("history", [True, False])
@pytest.mark.parametrize("handle", ["kept", "opened again"])
def test_a_table_that_is_lost_in_mid_run_is_not_created_again(
    sample: SampleInput, make_options: MakeOptions, monkeypatch: pytest.MonkeyPatch, mode: str, history: bool,
    handle: str,
) -> None:  # fmt: skip
    """Neither one with epochs of ours, nor one of somebody else that a first run has just joined.

    A handle that is kept does not notice; one that is opened again, as after Delta's checkpoint, finds no table.
    """
    options = make_options(max_files=1, mode=mode)
    table = Path(options.deciding.location)
    if history:
        make_epochs(sample, options, 1)
        if mode == "staged":
            commit_table(table)
    else:
        write_deltalake(str(table), pa.table({"id": pa.array([-1], pa.int64())}))
    sample.add("g.json", 3)
    cls = StagedDeltaSink if mode == "staged" else DeltaSink

    def lose(sink: DeltaSink) -> None:
        shutil.rmtree(table / "_delta_log")
        if handle == "opened again":
            sink.table._delta = None

    met = before(monkeypatch, cls, "commit", lose)
    run = run_once(options)
    assert met
    assert run.exit_code == 1, run.result
    assert run.result.error is not None
    assert f"{table} is gone" in run.result.error.message
    assert "backup" in run.result.error.hint
    assert not list(table.glob("_delta_log/*.json"))
    assert not pending_units(table)
