"""Going back: table, columns and checkpoint together; afterwards the result equals a run that never went wrong."""

from __future__ import annotations

import dataclasses
import gzip
import os
import shutil
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from deltalake import DeltaTable, write_deltalake
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from firnline.errors import FencedError, RollbackRefusedError
from firnline.history.edits.rollback import Rollback, RollbackPlan, find_epoch_at
from firnline.options import PipelineOptions
from firnline.run.commits import entry_commit
from firnline.run.open_pipeline import open_pipeline
from tests.support.committers import commit_table
from tests.support.pipelines import MakeOptions, make_epochs, pipeline_options, run_once, run_to_end, two_sinks
from tests.support.samples import SampleInput, table_ids


def roll_back(options: PipelineOptions, to: int, **settings: Any) -> RollbackPlan:
    plan, receipt = Rollback(open_pipeline(options), to, **settings).perform("test")
    assert receipt.epoch == plan.new_epoch
    return plan


def held(options: PipelineOptions) -> Any:
    return open_pipeline(options).deciding.load()


def columns(table: str) -> list[str]:
    return [field.name for field in DeltaTable(table).schema().fields]


def test_rows_columns_and_checkpoint_go_back_in_one_commit(sample: SampleInput, make_options: MakeOptions) -> None:
    options = make_options(max_files=1)
    make_epochs(sample, options, 2)
    before = table_ids(options.deciding.location)
    then = held(options)
    sample.add("f003.json", 3, extra="x")
    make_epochs(sample, options, 1, first=4)
    assert "extra" in columns(options.deciding.location)
    version = DeltaTable(options.deciding.location).version()
    plan = roll_back(options, 2)
    table = DeltaTable(options.deciding.location)
    assert table.version() == version + 2, "a claim, and one commit with everything"
    assert table_ids(options.deciding.location) == before
    assert "extra" not in columns(options.deciding.location)
    now = held(options)
    assert (now.epoch, now.checkpoint.positions) == (plan.new_epoch, then.checkpoint.positions)
    assert table.transaction_version(f"firnline:{options.name}") == now.epoch
    assert plan.sinks[0].columns_removed == ["extra"]
    assert (plan.input_files, plan.input_records) == (2, 6)
    assert plan.sinks[0].rows_removed == 6
    run_to_end(options)
    assert table_ids(options.deciding.location) == sample.ids
    assert held(options).epoch > now.epoch


def test_the_commit_says_what_it_did(sample: SampleInput, make_options: MakeOptions) -> None:
    options = make_options(max_files=1)
    make_epochs(sample, options, 3)
    roll_back(options, 1)
    newest = DeltaTable(options.deciding.location).history(1)[0]
    assert newest["operation"] == "RESTORE"
    assert '"kind":"rollback"' in newest["firnline"]
    assert '"to_epoch":1' in newest["firnline"]


def test_late_files_of_the_undone_epochs_are_read_again(sample: SampleInput, make_options: MakeOptions) -> None:
    options = make_options(max_files=1)
    sample.add("m.json", 3)
    sample.add("n.json", 3)
    run_to_end(options)
    first = held(options).epoch
    sample.add("a.json", 3)  # below the mark: late
    sample.add("z.json", 3)
    run_to_end(options)
    assert table_ids(options.deciding.location) == sample.ids
    roll_back(options, first)
    run_to_end(options)
    assert table_ids(options.deciding.location) == sample.ids


def test_a_file_that_was_half_read_is_read_on_from_there(sample: SampleInput, make_options: MakeOptions) -> None:
    options = make_options(max_events=4, max_inflight=1)
    sample.add("a.json", 30)
    run_to_end(options)
    assert held(options).epoch > 4
    roll_back(options, 3)
    assert 0 < sum(table_ids(options.deciding.location).values()) < 30
    run_to_end(options)
    assert table_ids(options.deciding.location) == sample.ids


def test_the_floor_never_goes_back_and_the_schema_version_grows(sample: SampleInput, make_options: MakeOptions) -> None:
    options = make_options(max_files=1, rollback_window=3)
    make_epochs(sample, options, 5)
    sample.add("f900.json", 3, extra=1)
    run_to_end(options)
    before = held(options).checkpoint
    assert before.floor == 3
    roll_back(options, 4)
    after = held(options).checkpoint
    assert after.floor == before.floor
    assert after.schema_version == before.schema_version + 1
    assert after.schema_fingerprint != before.schema_fingerprint


def test_another_tool_reads_the_position_gone_back_to(sample: SampleInput, make_options: MakeOptions) -> None:
    from firnline.sinks.delta.log import DeltaLog, decode_blizzard
    from firnline.storage import open_storage

    options = make_options(max_files=1)
    make_epochs(sample, options, 3)
    roll_back(options, 1)
    commit = DeltaLog(open_storage(options.deciding.location)).read(DeltaTable(options.deciding.location).version())
    assert commit is not None
    payload = commit.blizzard()
    assert payload is not None
    state = decode_blizzard(payload)["source_state"]
    assert str(state["last_committed_file"]).endswith("f001.json")


def test_one_can_go_back_again_and_again(sample: SampleInput, make_options: MakeOptions) -> None:
    options = make_options(max_files=1)
    make_epochs(sample, options, 4)
    roll_back(options, 3)
    roll_back(options, 2)
    run_to_end(options)
    assert table_ids(options.deciding.location) == sample.ids
    newest = held(options).epoch
    with pytest.raises(RollbackRefusedError, match="no longer belongs to the history"):
        roll_back(options, 4)
    roll_back(options, 6)
    assert held(options).epoch == newest + 1
    assert sum(table_ids(options.deciding.location).values()) == 6, "epoch 6 was the rollback to epoch 2"
    run_to_end(options)
    assert table_ids(options.deciding.location) == sample.ids


def test_a_file_that_was_set_aside_then_and_retried_since_is_retried_again(
    sample: SampleInput, make_options: MakeOptions
) -> None:
    options = make_options(max_files=1, file_attempts=1)
    sample.add("a.json", 3)
    whole = sample.add_truncated("b.json.gz")
    run_to_end(options)
    aside = held(options).epoch
    sample.path("b.json.gz").write_bytes(whole)
    sample.expect(gzip.decompress(whole).splitlines())
    pipeline = open_pipeline(options)
    pipeline.requests.ask_retry(str(sample.path("b.json.gz")), changed=True, ids=pipeline.ids)
    run_to_end(options)
    assert table_ids(options.deciding.location) == sample.ids
    roll_back(options, aside)
    run_to_end(options)
    assert table_ids(options.deciding.location) == sample.ids


def test_what_is_quarantined_after_it_comes_again_once(sample: SampleInput, make_options: MakeOptions) -> None:
    from firnline.history.quarantine import load_quarantine

    options = make_options(max_files=1)
    sample.add("a.json", 3, bad=1)
    run_to_end(options)
    sample.add("b.json", 3, bad=2)
    run_to_end(options)
    plan = roll_back(options, 1)
    assert plan.quarantined == 2
    run_to_end(options)
    found = [record["raw"] for record in load_quarantine(open_pipeline(options))]
    assert sorted(bytes(raw).strip() for raw in found) == sorted(sample.bad.elements())


def test_an_active_run_is_fenced(sample: SampleInput, make_options: MakeOptions) -> None:
    options = make_options(max_files=1)
    make_epochs(sample, options, 3)
    zombie = open_pipeline(options).deciding
    zombie.claim("zombie")
    roll_back(options, 1)
    pipeline = open_pipeline(options)
    now = pipeline.deciding.load()
    assert now.entry is not None
    entry = next(iter(pipeline.entries(now.entry)))
    late = dataclasses.replace(
        entry, checkpoint=dataclasses.replace(entry.checkpoint, epoch=now.epoch + 1, attempt="z")
    )
    commit = entry_commit(
        pipeline,
        zombie,
        dataclasses.replace(late, previous=now.entry),
        now.entry,
        pipeline.deciding.find_committed_schema(),
    )
    with pytest.raises(FencedError):
        zombie.commit(commit)


# -- refusals -------------------------------------------------------------------------------------------


def refused(options: PipelineOptions, to: int, **settings: Any) -> RollbackRefusedError:
    version = DeltaTable(options.deciding.location).version()
    with pytest.raises(RollbackRefusedError) as caught:
        roll_back(options, to, **settings)
    assert DeltaTable(options.deciding.location).version() == version, "refused before anything was written"
    return caught.value


def test_refused_when_the_input_is_gone_or_changed(sample: SampleInput, make_options: MakeOptions) -> None:
    options = make_options(max_files=1)
    make_epochs(sample, options, 4)
    path = sample.path("f003.json")
    text = path.read_bytes()
    path.unlink()
    assert "f003.json: gone" in refused(options, 1).message
    path.write_bytes(text + b"\n")
    assert "f003.json: changed" in refused(options, 1).message
    roll_back(options, 3)


def test_refused_when_files_are_vacuumed(sample: SampleInput, make_options: MakeOptions) -> None:
    options = make_options(max_files=1)
    make_epochs(sample, options, 3)
    table = DeltaTable(options.deciding.location)
    table.optimize.compact()
    table.vacuum(retention_hours=0, enforce_retention_duration=False, dry_run=False)
    error = refused(options, 2)
    assert "are vacuumed" in error.message
    assert "savepoint" in error.hint


def test_compaction_without_vacuum_is_no_hindrance(sample: SampleInput, make_options: MakeOptions) -> None:
    options = make_options(max_files=1)
    make_epochs(sample, options, 3)
    DeltaTable(options.deciding.location).optimize.compact()
    plan = roll_back(options, 2)
    assert (plan.sinks[0].rows_removed, plan.sinks[0].rows_restored) == (9, 6)
    run_to_end(options)
    assert table_ids(options.deciding.location) == sample.ids


def test_refused_when_another_pipeline_wrote_unless_it_is_named(
    sample: SampleInput, make_options: MakeOptions, tmp_path: Path
) -> None:
    options = make_options(max_files=1)
    make_epochs(sample, options, 2)
    other = SampleInput(tmp_path / "other")
    other.add("x.json", 2)
    run_to_end(make_options(name="other", path=str(other.folder)))
    make_epochs(sample, options, 1, first=3)
    error = refused(options, 1)
    assert "other (version" in error.message
    assert "--accept other" in error.hint
    roll_back(options, 1, accept=["other"])
    assert sum(table_ids(options.deciding.location).values()) == 3, "the other pipeline's rows are gone, as accepted"


def test_refused_when_somebody_else_deleted_rows(sample: SampleInput, make_options: MakeOptions) -> None:
    options = make_options(max_files=1)
    make_epochs(sample, options, 3)
    DeltaTable(options.deciding.location).delete("id = 8")
    assert "--accept DELETE" in refused(options, 2).hint


def test_refused_below_the_floor(sample: SampleInput, make_options: MakeOptions) -> None:
    options = make_options(max_files=1, rollback_window=2)
    make_epochs(sample, options, 6)
    floor = held(options).checkpoint.floor
    assert floor > 1
    error = refused(options, floor - 1)
    assert f"--to {floor}" in error.hint
    roll_back(options, floor)


@pytest.mark.parametrize(
    ("to", "words"), [(9, "is at epoch 3"), (3, "already"), (0, "it is the state before the first epoch")]
)
def test_refused_where_there_is_nothing(sample: SampleInput, make_options: MakeOptions, to: int, words: str) -> None:
    options = make_options(max_files=1)
    make_epochs(sample, options, 3)
    assert words in refused(options, to).message


def test_refused_when_the_log_is_cleaned_up(sample: SampleInput, make_options: MakeOptions) -> None:
    options = make_options(max_files=1)
    make_epochs(sample, options, 4)
    log = Path(options.deciding.location) / "_delta_log"
    DeltaTable(options.deciding.location).create_checkpoint()
    for path in log.glob("*.json"):
        if int(path.stem) <= DeltaTable(options.deciding.location).version() - 2:
            path.unlink()
    assert "no longer in the table's log" in refused(options, 1).message


# -- time -----------------------------------------------------------------------------------------------


def test_an_epoch_is_found_by_time(sample: SampleInput, make_options: MakeOptions) -> None:
    options = make_options(max_files=1)
    make_epochs(sample, options, 2)
    between = datetime.now(UTC)
    make_epochs(sample, options, 2, first=3)
    pipeline = open_pipeline(options)
    assert find_epoch_at(pipeline, between) == 2
    assert find_epoch_at(pipeline, datetime.now(UTC)) == 4
    with pytest.raises(RollbackRefusedError, match="the oldest that is known is epoch 1"):
        find_epoch_at(pipeline, between - timedelta(days=1))


# -- staged tables --------------------------------------------------------------------------------------


def test_staged_with_units_pending(sample: SampleInput, make_options: MakeOptions) -> None:
    options = make_options(max_files=1, mode="staged")
    make_epochs(sample, options, 2)
    commit_table(options.deciding.location)
    make_epochs(sample, options, 2, first=3)
    version = DeltaTable(options.deciding.location).version()
    with pytest.raises(RollbackRefusedError, match="is at epoch 2") as caught:
        roll_back(options, 3)
    assert "--discard-from 4" in caught.value.hint
    assert DeltaTable(options.deciding.location).version() == version
    commit_table(options.deciding.location)
    make_epochs(sample, options, 1, first=5)
    with pytest.raises(RollbackRefusedError, match="committed together with later ones") as caught:
        roll_back(options, 3)
    assert "--to 2 or 4" in caught.value.hint
    plan = roll_back(options, 2)
    assert (plan.pending_units, plan.from_epoch, plan.new_epoch) == (1, 5, 6)
    assert not list((Path(options.deciding.location) / "_staging" / "pending").glob("*.meta.json"))
    commit_table(options.deciding.location)
    assert sum(table_ids(options.deciding.location).values()) == 6
    run_to_end(options)
    commit_table(options.deciding.location)
    assert table_ids(options.deciding.location) == sample.ids


# -- several sinks --------------------------------------------------------------------------------------


def test_every_sink_goes_back(sample: SampleInput, make_options: MakeOptions, tmp_path: Path) -> None:
    options = make_options(max_files=1, sinks=two_sinks(tmp_path))
    make_epochs(sample, options, 4)
    plan = roll_back(options, 2)
    assert [s.rows_removed for s in plan.sinks] == [6, 6]
    one, copy = (table_ids(s.location) for s in options.sinks)
    assert one == copy
    assert sum(one.values()) == 6
    run_to_end(options)
    for sink in options.sinks:
        assert table_ids(sink.location) == sample.ids


def test_a_sink_that_cannot_go_back_must_be_named(
    sample: SampleInput, make_options: MakeOptions, tmp_path: Path
) -> None:
    options = make_options(max_files=1, sinks=two_sinks(tmp_path))
    make_epochs(sample, options, 3)
    copy = DeltaTable(options.sinks[1].location)
    copy.optimize.compact()
    copy.vacuum(retention_hours=0, enforce_retention_duration=False, dry_run=False)
    with pytest.raises(RollbackRefusedError, match="copy: 6 file"):
        roll_back(options, 2)
    plan = roll_back(options, 2, leave=["copy"])
    assert plan.sinks[1].left
    assert any("copy: left as it is: its rows and columns stay" in line for line in plan.not_undone)
    run_to_end(options)
    assert table_ids(options.sinks[0].location) == sample.ids
    assert sum(table_ids(options.sinks[1].location).values()) == sum(sample.ids.values()) + 3


def test_the_deciding_sink_cannot_be_left(sample: SampleInput, make_options: MakeOptions) -> None:
    options = make_options(max_files=1)
    make_epochs(sample, options, 2)
    with pytest.raises(RollbackRefusedError, match="no sink that could be left"):
        roll_back(options, 1, leave=["delta"])


@pytest.mark.parametrize("behind", [1, 3])
def test_a_sink_that_lags_is_brought_through_the_rollback_when_it_is_back(
    sample: SampleInput, make_options: MakeOptions, tmp_path: Path, behind: int
) -> None:
    """`behind` 1: it lacks epochs before the target; 3: it holds epochs that are undone."""
    main, copy = two_sinks(tmp_path)
    options = make_options(
        max_files=1, sinks=(main, dataclasses.replace(copy, required=False)), commit_policy="required"
    )
    make_epochs(sample, options, behind)
    log, away = Path(copy.table) / "_delta_log", Path(copy.table) / "_away"
    os.rename(log, away)
    log.write_text("an outage")
    sample.add("f100.json", 3)
    sample.add("f101.json", 3)
    run = run_once(options)
    assert held(options).epoch == behind + 2, run.result
    plan, _ = Rollback(open_pipeline(options), 2, leave=[]).plan(), None
    assert plan.refusals, "a sink that cannot be read must be named"
    log.unlink()
    os.rename(away, log)
    roll_back(options, 2)
    for sink in options.sinks:
        assert sum(table_ids(sink.location).values()) == 6
    run_to_end(options)
    for sink in options.sinks:
        assert table_ids(sink.location) == sample.ids


# -- the property ---------------------------------------------------------------------------------------


@settings(max_examples=12, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(steps=st.lists(st.integers(0, 5), min_size=3, max_size=8), late=st.booleans())
def test_any_rollbacks_end_like_a_run_that_never_went_wrong(tmp_path: Path, steps: list[int], late: bool) -> None:
    folder = tmp_path / "case"
    shutil.rmtree(folder, ignore_errors=True)
    sample = SampleInput(folder / "in")
    options = pipeline_options(str(folder / "in"), str(folder / "out"), max_files=2, partition_by=("month",))
    for number, step in enumerate(steps):
        sample.add(f"{'f' if not late or number % 2 else 'a'}{number:03d}.json", 2, **({"e": step} if step > 3 else {}))
        run_to_end(options)
        newest = held(options).epoch
        known = [e.epoch for e in open_pipeline(options).entries(held(options).entry)]
        if step and newest - step in known:
            roll_back(options, newest - step)
    run_to_end(options)
    assert table_ids(options.deciding.location) == sample.ids


def test_a_table_written_by_others_before_us_is_left_alone(sample: SampleInput, make_options: MakeOptions) -> None:
    options = make_options(max_files=1)
    write_deltalake(options.deciding.location, pa.table({"id": [-1], "month": ["2026-01"], "v": [0.5]}))
    make_epochs(sample, options, 3)
    roll_back(options, 1)
    assert table_ids(options.deciding.location)[-1] == 1
    run_to_end(options)
    assert table_ids(options.deciding.location) - sample.ids == {-1: 1}
