"""A ledger with a hole: nothing is silent, nothing is guessed, and a repair makes late files readable again."""

from __future__ import annotations

import json
import shutil
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from firnline.checkpoint.ledger import Fold
from firnline.errors import CheckpointError, ConfigError
from firnline.history.edits.ledger_repair import LedgerRepair, RepairPlan
from firnline.history.savepoints.create import create_savepoint
from firnline.history.status import load_status
from firnline.options import PipelineOptions, StoreOptions
from firnline.run.open_pipeline import open_pipeline
from firnline.types import Json, RandomIds
from tests.support.damage import break_info, commits_of, ledger_files
from tests.support.pipelines import LocalRun, MakeOptions, run_once, run_to_end
from tests.support.samples import SampleInput, table_ids


@pytest.fixture
def options(sample: SampleInput, make_options: MakeOptions) -> PipelineOptions:
    """Four epochs of one file each: f2, f4, f6, f8."""
    options: PipelineOptions = make_options(max_files=1)
    read(sample, options, 2, 4, 6, 8)
    return options


def read(sample: SampleInput, options: PipelineOptions, *numbers: int) -> None:
    for number in numbers:
        sample.add(f"f{number}.json", 3)
    run_to_end(options)


def entry_of(options: PipelineOptions, epoch: int) -> Path:
    return ledger_files(options.deciding.location, options.name)[epoch - 1]


def spoil_checkpoint(entry: Path) -> None:
    """Damage an entry so that its list of files stays whole."""
    entry.write_text(entry.read_text().replace('"run":"', '"run":"x', 1))


def repair(options: PipelineOptions, **settings: Any) -> RepairPlan:
    plan, _ = LedgerRepair(open_pipeline(options), **settings).perform(RandomIds().new())
    return plan


def taken(plan: RepairPlan) -> dict[str, str]:
    return {Path(file.path).name: file.taken_as for file in plan.files}


def ids(options: PipelineOptions) -> Counter[int]:
    return table_ids(options.deciding.location)


def run_with_hole(options: PipelineOptions) -> LocalRun:
    run = run_once(options)
    assert (run.exit_code, run.error_code) == (1, "ledger-hole")
    assert run.result.error is not None
    assert "firnline ledger repair" in run.result.error.hint
    return run


def test_a_run_once_with_a_hole_reads_what_is_new_and_fails(options: PipelineOptions, sample: SampleInput) -> None:
    entry_of(options, 2).unlink()
    before = Counter(sample.ids)
    sample.add("f3.json", 3)
    late = sample.ids - before
    sample.add("f9.json", 3)
    run_with_hole(options)
    assert ids(options) == sample.ids - late
    assert "is missing" in str(load_status(open_pipeline(options)).ledger_hole)
    run_with_hole(options)  # it stays so until somebody repairs it


def test_late_files_that_are_ignored_need_no_ledger(sample: SampleInput, make_options: MakeOptions) -> None:
    options = make_options(max_files=1, late_files="ignore")
    read(sample, options, 2, 4)
    entry_of(options, 1).unlink()
    run_to_end(options)


def test_an_entry_whose_list_of_files_is_intact_asks_nobody(options: PipelineOptions, sample: SampleInput) -> None:
    spoil_checkpoint(entry_of(options, 2))
    sample.add("f3.json", 3)
    run_with_hole(options)
    plan = repair(options)
    assert taken(plan) == {"f3.json": "new"}
    run_to_end(options)
    assert ids(options) == sample.ids
    assert load_status(open_pipeline(options)).ledger_hole is None


def test_what_nothing_tells_is_decided_by_name(options: PipelineOptions, sample: SampleInput) -> None:
    entry_of(options, 2).unlink()
    sample.add("f3.json", 3)
    plan = LedgerRepair(open_pipeline(options)).plan()
    assert taken(plan) == {"f3.json": "unknown", "f4.json": "unknown"}
    assert [(hole.entry.epoch, hole.goes_on_at) for hole in plan.holes] == [(2, 1)]
    before = open_pipeline(options).load()
    for decided in ({}, {"new": ["*/f3.json"]}, {"processed": ["*/f4.json"]}):
        with pytest.raises(ConfigError, match="nothing tells"):
            repair(options, **decided)
    assert open_pipeline(options).load() == before
    assert taken(repair(options, new=["*/f3.json"], processed=["*"])) == {"f3.json": "new", "f4.json": "processed"}
    run_to_end(options)
    assert ids(options) == sample.ids
    sample.add("f5.json", 3)
    run_to_end(options)
    assert ids(options) == sample.ids


def test_rows_that_tell_their_file_decide(sample: SampleInput, make_options: MakeOptions) -> None:
    options = make_options(max_files=1, lineage=True)
    read(sample, options, 2, 4, 6)
    entry_of(options, 2).unlink()
    sample.add("f3.json", 3)
    plan = LedgerRepair(open_pipeline(options)).plan()
    assert taken(plan) == {"f3.json": "unknown", "f4.json": "processed"}
    repair(options, new=["*"])
    run_to_end(options)
    assert ids(options) == sample.ids


def test_a_copy_is_put_back_and_nothing_is_decided(
    options: PipelineOptions, sample: SampleInput, tmp_path: Path
) -> None:
    backup = tmp_path / "backup"
    shutil.copytree(Path(options.deciding.location) / "_firnline" / options.name / "ledger", backup)
    entry_of(options, 1).unlink()
    entry_of(options, 1).write_bytes(b"{}")  # what is now the oldest file: the entry of epoch 2
    epoch = open_pipeline(options).load().epoch
    plan = repair(options, copies=[str(backup)])
    assert [Path(str(hole.copy)).name[:20] for hole in plan.holes] == [f"{n:020d}" for n in (2, 1)]
    assert open_pipeline(options).load().epoch == epoch
    sample.add("f3.json", 3)
    run_to_end(options)
    assert ids(options) == sample.ids


def test_a_savepoint_is_a_copy(options: PipelineOptions, sample: SampleInput, tmp_path: Path) -> None:
    create_savepoint(open_pipeline(options), str(tmp_path / "saved"))
    entry_of(options, 3).write_bytes(b"")
    assert repair(options).new_epoch is None
    sample.add("f3.json", 3)
    run_to_end(options)
    assert ids(options) == sample.ids


def test_a_copy_that_is_not_what_the_chain_names_is_left(options: PipelineOptions, tmp_path: Path) -> None:
    entry = entry_of(options, 2)
    (tmp_path / "backup").mkdir()
    shutil.copy(entry_of(options, 3), tmp_path / "backup" / entry.name)
    entry.unlink()
    plan = LedgerRepair(open_pipeline(options), copies=[str(tmp_path / "backup")]).plan()
    assert [hole.copy for hole in plan.holes] == [None]


def test_where_the_log_is_silent_nothing_below_is_taken_for_granted(options: PipelineOptions) -> None:
    entry_of(options, 3).unlink()
    for commit in commits_of(options.deciding.location, options.name)[:3]:
        break_info(commit)
    plan = LedgerRepair(open_pipeline(options)).plan()
    assert [hole.goes_on_at for hole in plan.holes] == [None]
    assert {Path(f.path).name: f.how for f in plan.files if "names it" in f.how}.keys() == {"f2.json", "f4.json"}
    assert taken(plan) == dict.fromkeys(("f2.json", "f4.json", "f6.json"), "unknown")


def test_a_lost_fold_is_bridged_and_a_fold_keeps_the_bridge(
    options: PipelineOptions, sample: SampleInput, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("firnline.checkpoint.ledger.FOLD_ENTRIES", 2)
    pipeline = open_pipeline(options)
    tip = pipeline.load().entry
    assert tip is not None
    assert pipeline.ledger.fold(tip, 3) == 2
    next(Path(options.deciding.location).rglob("fold-*")).write_bytes(b"rot")
    sample.add("f3.json", 3)
    assert set(taken(LedgerRepair(pipeline).plan())) == {"f2.json", "f3.json", "f4.json"}
    repair(options, new=["*/f3.json"], processed=["*"])
    read(sample, options, 9)
    tip = pipeline.load().entry
    assert tip is not None
    assert pipeline.ledger.fold(tip, tip.epoch) > 1  # the repair is folded, and still leads over the hole
    assert any(link.edits for link in pipeline.ledger.chain(tip) if isinstance(link, Fold))
    read(sample, options, 5)
    assert ids(options) == sample.ids
    saved, _ = create_savepoint(open_pipeline(options), str(Path(options.deciding.location).parent / "saved"))
    assert saved.epoch == pipeline.load().epoch


def test_a_second_hole_needs_a_second_decision(options: PipelineOptions, sample: SampleInput) -> None:
    entry_of(options, 1).unlink()
    repair(options, processed=["*"])
    (damaged := entry_of(options, 2)).unlink()  # of epoch 3
    assert damaged.name.startswith(f"{3:020d}")
    sample.add("f3.json", 3)
    assert set(taken(LedgerRepair(open_pipeline(options)).plan())) == {"f3.json", "f6.json"}
    repair(options, new=["*/f3.json"], processed=["*/f6.json"])
    run_to_end(options)
    assert ids(options) == sample.ids


def test_files_that_come_while_it_is_decided_are_not_swallowed(
    options: PipelineOptions, sample: SampleInput, monkeypatch: pytest.MonkeyPatch
) -> None:
    entry_of(options, 2).unlink()
    pipeline = open_pipeline(options)
    claim = pipeline.deciding.claim

    def arrives_meanwhile(*args: Any, **kwargs: Any) -> Any:
        sample.add("f3.json", 3)
        return claim(*args, **kwargs)

    monkeypatch.setattr(pipeline.deciding, "claim", arrives_meanwhile)
    with pytest.raises(CheckpointError, match="came or went"):
        LedgerRepair(pipeline, processed=["*"]).perform(RandomIds().new())
    repair(options, processed=["*/f4.json"], new=["*/f3.json"])
    run_to_end(options)
    assert ids(options) == sample.ids


def test_it_is_put_on_record(sample: SampleInput, make_options: MakeOptions, tmp_path: Path) -> None:
    from firnline.stores import open_store
    from firnline.stores.audit import walk_audit

    store = StoreOptions(type="file", path=str(tmp_path / "store"))
    options = make_options(max_files=1, store=store)
    read(sample, options, 2, 4)
    entry_of(options, 1).unlink()
    repair(options, processed=["*"])
    opened = open_store(store)
    trail = [entry.record for entry in walk_audit(opened, options.name) if entry.record is not None]
    opened.close()
    assert [(one.what, one.outcome) for one in trail] == [("ledger-repair", "done"), ("ledger-repair", "begun")]
    assert trail[0].details["assume_processed"] == ["*"]
    run_to_end(options)


def test_rolled_back_to_before_the_repair_the_hole_is_told_again(options: PipelineOptions, sample: SampleInput) -> None:
    from firnline.history.edits.rollback import Rollback

    entry_of(options, 1).unlink()
    repair(options, processed=["*"])
    Rollback(open_pipeline(options), 3).perform(RandomIds().new())
    run_with_hole(options)
    assert ids(options) == sample.ids


def test_the_command_shows_the_plan_and_does_it(
    options: PipelineOptions, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from firnline.cli import ledger as command
    from firnline.cli.main import run_command

    monkeypatch.setattr(command, "load_pipeline", lambda _: open_pipeline(options))

    def told(*flags: str) -> Json:
        assert run_command(["ledger", "repair", "--json", *flags]) == 0
        return json.loads(capsys.readouterr().out)

    assert told()["holes"] == []
    entry_of(options, 2).unlink()
    plan = told()
    assert (plan["done"], plan["new_epoch"], [f["taken_as"] for f in plan["files"]]) == (False, 5, ["unknown"])
    assert run_command(["ledger", "repair", "--yes"]) == 2
    assert "--assume-processed" in capsys.readouterr().err
    assert told("--assume-processed", "*", "--yes")["done"] is True
    assert told()["holes"] == []
    assert run_command(["ledger", "repair"]) == 0
    assert "the ledger is whole" in capsys.readouterr().out
