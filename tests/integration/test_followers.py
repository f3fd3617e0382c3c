"""Followers: sinks that are delivered from the outbox, in runs with a Delta table that decides."""

from __future__ import annotations

import time
from collections import Counter
from dataclasses import replace
from datetime import timedelta
from pathlib import Path

import pytest

from firnline.errors import CommitUnknownError, ConfigError, RollbackRefusedError
from firnline.history.edits.restore import restore_savepoint
from firnline.history.edits.rollback import Rollback
from firnline.history.edits.sinks import SinkEdit
from firnline.history.savepoints.create import create_savepoint
from firnline.history.sinks import find_next_tries, load_sinks
from firnline.history.status import load_status
from firnline.maintenance.gc import gc
from firnline.options import OutboxOptions, PipelineOptions
from firnline.run.observer import SinkLag
from firnline.run.open_pipeline import open_pipeline
from firnline.run.status import load_runs
from firnline.sinks.base import EpochCommit, RunTasks
from firnline.sinks.dead_letters import list_dead_letters, read_letters
from firnline.sinks.delta.options import DeltaSinkOptions
from firnline.sinks.follower import EpochDelivery, FollowerHead
from firnline.sinks.known import find_away
from firnline.testing.sinks import OpenSink, ReadRows, SinkConformance
from firnline.types import Receipt
from tests.support.pipelines import MakeOptions, run_once, run_to_end
from tests.support.samples import SampleInput, table_ids
from tests.support.sqlite_sink import (
    DOWN,
    SqliteSink,
    SqliteSinkOptions,
    register_sqlite,
    sqlite_ids,
    sqlite_rows,
)


@pytest.fixture(autouse=True)
def kind(monkeypatch: pytest.MonkeyPatch) -> None:
    register_sqlite(monkeypatch)


class TestSqliteSink(SinkConformance):
    @pytest.fixture(params=[False, True], ids=["whole", "ranges"])
    def open_sink(self, tmp_path: Path, request: pytest.FixtureRequest) -> OpenSink:
        options = SqliteSinkOptions("copy", str(tmp_path / "copy.db"), ranges=request.param)
        return lambda context: SqliteSink(options, context)

    @pytest.fixture
    def read_rows(self, tmp_path: Path) -> ReadRows:
        return lambda: sqlite_rows(tmp_path / "copy.db")


def options_of(make_options: MakeOptions, folder: Path, *followers: SqliteSinkOptions) -> PipelineOptions:
    return make_options(max_files=1, sinks=(DeltaSinkOptions("table", str(folder / "table")), *followers))


def follower(folder: Path, name: str = "copy", **settings: object) -> SqliteSinkOptions:
    return SqliteSinkOptions(name, str(folder / f"{name}.db"), **settings)  # type: ignore[arg-type]


def outbox_files(folder: Path) -> list[Path]:
    return sorted((folder / "table" / "_firnline" / "demo" / "outbox").rglob("*.arrow"))


@pytest.mark.parametrize("ranges", [False, True])
def test_a_follower_gets_every_row_once(
    make_options: MakeOptions, sample: SampleInput, tmp_path: Path, ranges: bool
) -> None:
    options = options_of(make_options, tmp_path, follower(tmp_path, ranges=ranges))
    for number in (1, 2, 3):
        sample.add(f"f{number}.json", 350)
        run_to_end(options)
    assert sqlite_ids(tmp_path / "copy.db") == table_ids(tmp_path / "table") == sample.ids


def test_followers_of_one_input_share_files(make_options: MakeOptions, sample: SampleInput, tmp_path: Path) -> None:
    options = options_of(make_options, tmp_path, follower(tmp_path), follower(tmp_path, "other"))
    sample.add("f1.json", 10)
    run_to_end(options)
    assert len(outbox_files(tmp_path)) == 1
    assert sqlite_ids(tmp_path / "copy.db") == sqlite_ids(tmp_path / "other.db") == sample.ids


def test_an_optional_follower_that_is_down_stops_nobody_and_catches_up(
    make_options: MakeOptions, sample: SampleInput, tmp_path: Path
) -> None:
    options = options_of(make_options, tmp_path, follower(tmp_path, required=False))
    down = tmp_path / f"copy.db{DOWN}"
    down.touch()
    for number in (1, 2, 3):
        sample.add(f"f{number}.json", 10)
        run_to_end(options)
    assert table_ids(tmp_path / "table") == sample.ids
    assert sqlite_rows(tmp_path / "copy.db") == []
    down.unlink()
    run_to_end(options)
    assert sqlite_ids(tmp_path / "copy.db") == sample.ids


def test_a_required_follower_that_is_down_holds_the_checkpoint_back(
    make_options: MakeOptions, sample: SampleInput, tmp_path: Path
) -> None:
    options = options_of(make_options, tmp_path, follower(tmp_path))
    down = tmp_path / f"copy.db{DOWN}"
    down.touch()
    sample.add("f1.json", 10)
    assert run_once(options).exit_code == 3
    down.unlink()
    run_to_end(options)
    assert sqlite_ids(tmp_path / "copy.db") == table_ids(tmp_path / "table") == sample.ids


def test_an_epoch_is_delivered_by_the_settings_that_it_was_made_with(
    make_options: MakeOptions, sample: SampleInput, tmp_path: Path
) -> None:
    options = options_of(make_options, tmp_path, follower(tmp_path, required=False, where="id <= 5"))
    (tmp_path / f"copy.db{DOWN}").touch()
    sample.add("f1.json", 10)
    run_to_end(options)
    (tmp_path / f"copy.db{DOWN}").unlink()
    table, copy = options.sinks
    edited = replace(options, sinks=(table, replace(copy, where="", exclude=("text",))))  # type: ignore[call-arg]
    sample.add("f2.json", 10)
    run_to_end(edited)
    expected = Counter(number for number in sample.ids if number <= 5 or number > 10)
    assert sqlite_ids(tmp_path / "copy.db") == expected


def test_a_bad_row_becomes_a_dead_letter_and_the_others_go_on(
    make_options: MakeOptions, sample: SampleInput, tmp_path: Path
) -> None:
    options = options_of(make_options, tmp_path, follower(tmp_path, refused=3, on_bad_row="dead_letter"))
    sample.add("f1.json", 10)
    run_to_end(options)
    assert sqlite_ids(tmp_path / "copy.db") == sample.ids - Counter([3])
    pipeline = open_pipeline(options)
    letters = [
        letter
        for key in list_dead_letters(pipeline.storage, "demo", "copy")
        for letter in read_letters(pipeline.storage, key)
    ]
    assert [(letter.reason, letter.values["id"]) for letter in letters] == [("refused", 3)]


def test_a_bad_row_stops_a_sink_that_says_so(make_options: MakeOptions, sample: SampleInput, tmp_path: Path) -> None:
    options = options_of(make_options, tmp_path, follower(tmp_path, refused=3))
    sample.add("f1.json", 10)
    result = run_once(options)
    assert (result.exit_code, result.error_code) == (1, "bad-row")
    assert sqlite_rows(tmp_path / "copy.db") == []


def test_a_rollback_leaves_a_follower_only_when_told_to(
    make_options: MakeOptions, sample: SampleInput, tmp_path: Path
) -> None:
    options = options_of(make_options, tmp_path, follower(tmp_path))
    for number in (1, 2):
        sample.add(f"f{number}.json", 3)
        run_to_end(options)
    with pytest.raises(RollbackRefusedError, match="copy cannot take rows back"):
        Rollback(open_pipeline(options), 1).perform("person")
    Rollback(open_pipeline(options), 1, leave=["copy"]).perform("person")
    run_to_end(options)
    assert table_ids(tmp_path / "table") == sample.ids
    assert sqlite_ids(tmp_path / "copy.db") - sample.ids == Counter([4, 5, 6]), "left as it was, and given again"


def test_delivered_files_stay_for_a_while_and_then_go(
    make_options: MakeOptions, sample: SampleInput, tmp_path: Path
) -> None:
    options = options_of(make_options, tmp_path, follower(tmp_path))
    sample.add("f1.json", 3)
    run_to_end(options)
    assert len(outbox_files(tmp_path)) == 1
    for number in range(2, 4):
        sample.add(f"f{number}.json", 3)
    run_to_end(replace(options, outbox=OutboxOptions(keep=timedelta(0))))
    assert len(outbox_files(tmp_path)) < 3


# -- what the pipeline remembers of its followers ---------------------------------------------------------


def test_a_follower_that_is_added_begins_with_the_next_epoch(
    make_options: MakeOptions, sample: SampleInput, tmp_path: Path
) -> None:
    alone = options_of(make_options, tmp_path)
    sample.add("f1.json", 10)
    run_to_end(alone)
    before = Counter(sample.ids)
    options = options_of(make_options, tmp_path, follower(tmp_path))
    run_to_end(options)  # nothing to do
    for number in (2, 3):
        sample.add(f"f{number}.json", 10)
        run_to_end(options)
    assert sqlite_ids(tmp_path / "copy.db") == sample.ids - before
    assert table_ids(tmp_path / "table") == sample.ids


def test_a_follower_that_is_missing_renamed_or_moved_is_refused_by_name(
    make_options: MakeOptions, sample: SampleInput, tmp_path: Path
) -> None:
    sample.add("f1.json", 10)
    run_to_end(options_of(make_options, tmp_path, follower(tmp_path)))
    sample.add("f2.json", 10)
    other = SqliteSinkOptions("other", str(tmp_path / "copy.db"))
    moved = SqliteSinkOptions("copy", str(tmp_path / "elsewhere.db"))
    for sinks, words in (
        ((), "delivers to sink 'copy'"),
        ((other,), "which knows it as 'copy'"),
        ((moved,), "has written to"),
    ):
        result = run_once(options_of(make_options, tmp_path, *sinks)).result
        assert result.exit_code == 2
        assert result.error is not None
        assert words in result.error.message
    run_to_end(options_of(make_options, tmp_path, replace(other, renamed_from="copy")))
    assert sqlite_ids(tmp_path / "copy.db") == sample.ids


def test_a_renamed_follower_gets_what_waited_under_its_old_name(
    make_options: MakeOptions, sample: SampleInput, tmp_path: Path
) -> None:
    down = tmp_path / f"copy.db{DOWN}"
    sample.add("f1.json", 10)
    run_to_end(options_of(make_options, tmp_path, follower(tmp_path, required=False)))
    down.touch()
    sample.add("f2.json", 10)
    run_to_end(options_of(make_options, tmp_path, follower(tmp_path, required=False)))
    down.unlink()
    renamed = SqliteSinkOptions("other", str(tmp_path / "copy.db"), renamed_from="copy")
    run_to_end(options_of(make_options, tmp_path, renamed))
    assert sqlite_ids(tmp_path / "copy.db") == sample.ids


@pytest.mark.parametrize("lost", [1, 2, 3])
def test_a_follower_that_went_back_gets_what_it_lost(
    make_options: MakeOptions, sample: SampleInput, tmp_path: Path, lost: int
) -> None:
    options = options_of(make_options, tmp_path, follower(tmp_path))
    for number in (1, 2, 3):
        if number == 4 - lost:
            held = (tmp_path / "copy.db").read_bytes() if number > 1 else None
        sample.add(f"f{number}.json", 10)
        run_to_end(options)
    (tmp_path / "copy.db").unlink()
    if held is not None:
        (tmp_path / "copy.db").write_bytes(held)  # restored from a backup
    run_to_end(options)
    assert sqlite_ids(tmp_path / "copy.db") == sample.ids


def test_a_follower_that_went_back_beyond_the_outbox_is_named_and_nothing_is_written(
    make_options: MakeOptions, sample: SampleInput, tmp_path: Path
) -> None:
    options = options_of(make_options, tmp_path, follower(tmp_path))
    for number in (1, 2):
        sample.add(f"f{number}.json", 10)
        run_to_end(options)
    for path in outbox_files(tmp_path):
        path.unlink()
    (tmp_path / "copy.db").unlink()
    sample.add("f3.json", 10)
    run = run_once(options)
    assert run.error_code == "sink-went-back"
    assert not (tmp_path / "copy.db").exists()


def test_a_target_of_another_pipeline_is_refused_by_name(
    make_options: MakeOptions, sample: SampleInput, tmp_path: Path
) -> None:
    sample.add("f1.json", 10)
    run_to_end(options_of(make_options, tmp_path, follower(tmp_path)))
    held = sqlite_rows(tmp_path / "copy.db")
    (tmp_path / "b").mkdir()
    other = make_options(
        max_files=1, sinks=(DeltaSinkOptions("table", str(tmp_path / "b" / "table")), follower(tmp_path))
    )
    for _ in range(2):
        assert run_once(other).exit_code == 1
    assert sqlite_rows(tmp_path / "copy.db") == held


def test_a_follower_that_lags_too_far_is_set_aside_and_stays_so(
    make_options: MakeOptions, sample: SampleInput, tmp_path: Path
) -> None:
    copy = follower(tmp_path, required=False)
    options = replace(options_of(make_options, tmp_path, copy), outbox=OutboxOptions(max_bytes=1, keep=timedelta(0)))
    sample.add("f1.json", 10)
    run_to_end(options)
    held = sqlite_ids(tmp_path / "copy.db")
    down = tmp_path / f"copy.db{DOWN}"
    down.touch()
    for number in (2, 3, 4):
        sample.add(f"f{number}.json", 10)
    run_to_end(options)
    down.unlink()
    sample.add("f5.json", 10)
    run_to_end(options)
    assert table_ids(tmp_path / "table") == sample.ids
    assert sqlite_ids(tmp_path / "copy.db") == held, "it gets nothing until somebody resyncs it"
    checkpoint = open_pipeline(options).load().checkpoint
    assert "wait for it in the outbox" in find_away(checkpoint, options.followers)["copy"]


def test_a_sink_that_a_quorum_needs_is_not_set_aside(
    make_options: MakeOptions, sample: SampleInput, tmp_path: Path
) -> None:
    copy = follower(tmp_path, required=False)
    table = DeltaSinkOptions("table", str(tmp_path / "table"))
    quorum = make_options(max_files=1, commit_policy="quorum", quorum=2, sinks=(table, copy))
    full = replace(quorum, outbox=OutboxOptions(max_bytes=1, keep=timedelta(0)))
    sample.add("f1.json", 10)
    run_to_end(full)
    (tmp_path / f"copy.db{DOWN}").touch()
    for number in (2, 3, 4):
        sample.add(f"f{number}.json", 10)
    result = run_once(full).result
    assert result.error is not None
    assert result.exit_code
    assert find_away(open_pipeline(full).load().checkpoint, full.followers) == {}
    one = replace(full, batch=replace(full.batch, quorum=1))
    run_to_end(one)
    assert "copy" in find_away(open_pipeline(full).load().checkpoint, full.followers)
    result = run_once(full).result
    assert result.exit_code == 2
    assert result.error is not None
    assert result.error.message == "batch.quorum is 2, and it needs a sink that is set aside: copy"


def test_the_receipt_of_an_epoch_that_was_never_decided_is_refused(
    make_options: MakeOptions, sample: SampleInput, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    options = options_of(make_options, tmp_path, follower(tmp_path))
    sample.add("f1.json", 10)
    run_to_end(options)
    deliver = SqliteSink.deliver

    def of_another(self: SqliteSink, delivery: EpochDelivery) -> FollowerHead:
        checkpoint = replace(delivery.commit.checkpoint, attempt="stranger")
        commit = replace(delivery.commit, checkpoint=checkpoint)
        deliver(self, replace(delivery, commit=commit))
        raise CommitUnknownError("the answer was lost")

    monkeypatch.setattr(SqliteSink, "deliver", of_another)
    sample.add("f2.json", 10)
    result = run_once(options).result
    assert result.error is not None
    assert "holds another epoch 2 than was decided: attempt stranger" in result.error.message


def test_a_full_outbox_stops_the_run_if_the_spec_says_so(
    make_options: MakeOptions, sample: SampleInput, tmp_path: Path
) -> None:
    copy = follower(tmp_path, required=False)
    full = OutboxOptions(max_bytes=1, on_full="stop")
    options = replace(options_of(make_options, tmp_path, copy), outbox=full)
    (tmp_path / f"copy.db{DOWN}").touch()
    for number in (1, 2, 3):
        sample.add(f"f{number}.json", 10)
    assert run_once(options).error_code == "outbox-full"


def test_a_run_does_not_stop_while_a_follower_catches_up(
    make_options: MakeOptions, sample: SampleInput, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each start would end the delivery that the start before it had begun."""
    copy = follower(tmp_path, required=False)
    options = options_of(make_options, tmp_path, copy)
    (tmp_path / f"copy.db{DOWN}").touch()
    for number in (1, 2, 3):
        sample.add(f"f{number}.json", 10)
    run_to_end(options)
    (tmp_path / f"copy.db{DOWN}").unlink()
    deliver = SqliteSink.deliver

    def slowly(self: SqliteSink, delivery: EpochDelivery) -> FollowerHead:
        time.sleep(0.3)
        return deliver(self, delivery)

    monkeypatch.setattr(SqliteSink, "deliver", slowly)
    sample.add("f4.json", 10)
    run_to_end(replace(options, outbox=OutboxOptions(max_bytes=1, on_full="stop")))
    run_to_end(options)
    assert sqlite_ids(tmp_path / "copy.db") == sample.ids


# -- edits of what it remembers ---------------------------------------------------------------------------


def give_up(options: PipelineOptions, sample: SampleInput, tmp_path: Path) -> PipelineOptions:
    """Let the follower lag until it is set aside; then its target is back."""
    small = replace(options, outbox=OutboxOptions(max_bytes=1, keep=timedelta(0)))
    down = tmp_path / f"copy.db{DOWN}"
    down.touch()
    for number in (2, 3, 4):
        sample.add(f"f{number}.json", 10)
    run_to_end(small)
    down.unlink()
    assert find_away(open_pipeline(options).load().checkpoint, options.followers)
    return small


def test_a_copy_gives_a_sink_the_rows_of_a_table_and_every_later_epoch(
    make_options: MakeOptions, sample: SampleInput, tmp_path: Path
) -> None:
    sample.add("f1.json", 10)
    run_to_end(options_of(make_options, tmp_path))
    options = options_of(make_options, tmp_path, follower(tmp_path, copy_from="table"))
    plan, _ = SinkEdit(open_pipeline(options), "resync", "copy").perform("person")
    assert (plan.rows, plan.copy_from) == (10, "table")
    run_to_end(options)
    assert sqlite_ids(tmp_path / "copy.db") == sample.ids
    sample.add("f2.json", 10)
    run_to_end(options)
    assert sqlite_ids(tmp_path / "copy.db") == table_ids(tmp_path / "table") == sample.ids


def test_a_sink_that_was_set_aside_is_copied_anew(
    make_options: MakeOptions, sample: SampleInput, tmp_path: Path
) -> None:
    sample.add("f1.json", 10)
    options = options_of(make_options, tmp_path, follower(tmp_path, required=False))
    run_to_end(options)
    held = sqlite_ids(tmp_path / "copy.db")
    give_up(options, sample, tmp_path)
    SinkEdit(open_pipeline(options), "resync", "copy").perform("person")
    sample.add("f5.json", 10)
    run_to_end(options)
    assert sqlite_ids(tmp_path / "copy.db") == sample.ids + held, "a sink that appends keeps what it had"


def test_a_sink_that_was_set_aside_goes_on_after_a_gap(
    make_options: MakeOptions, sample: SampleInput, tmp_path: Path
) -> None:
    sample.add("f1.json", 10)
    options = options_of(make_options, tmp_path, follower(tmp_path, required=False))
    run_to_end(options)
    held = sqlite_ids(tmp_path / "copy.db")
    give_up(options, sample, tmp_path)
    before = Counter(sample.ids)
    SinkEdit(open_pipeline(options), "resume", "copy").perform("person")
    sample.add("f5.json", 10)
    run_to_end(options)
    assert sqlite_ids(tmp_path / "copy.db") == held + (sample.ids - before)


def test_a_sink_is_forgotten_and_another_target_begins(
    make_options: MakeOptions, sample: SampleInput, tmp_path: Path
) -> None:
    sample.add("f1.json", 10)
    run_to_end(options_of(make_options, tmp_path, follower(tmp_path)))
    before = Counter(sample.ids)
    moved = options_of(make_options, tmp_path, SqliteSinkOptions("copy", str(tmp_path / "elsewhere.db")))
    SinkEdit(open_pipeline(moved), "forget", "copy").perform("person")
    sample.add("f2.json", 10)
    run_to_end(moved)
    assert sqlite_ids(tmp_path / "copy.db") == before
    assert sqlite_ids(tmp_path / "elsewhere.db") == sample.ids - before


def test_an_edit_of_an_unknown_sink_names_the_known_ones(
    make_options: MakeOptions, sample: SampleInput, tmp_path: Path
) -> None:
    sample.add("f1.json", 10)
    options = options_of(make_options, tmp_path, follower(tmp_path))
    run_to_end(options)
    with pytest.raises(ConfigError, match="delivers to no sink 'cpoy'") as refused:
        SinkEdit(open_pipeline(options), "forget", "cpoy").plan()
    assert refused.value.hint == "Did you mean 'copy'?"


def test_the_sinks_of_a_pipeline_are_listed_with_what_they_lack(
    make_options: MakeOptions, sample: SampleInput, tmp_path: Path
) -> None:
    options = options_of(make_options, tmp_path, follower(tmp_path, required=False))
    sample.add("f1.json", 10)
    run_to_end(options)
    (tmp_path / f"copy.db{DOWN}").touch()
    sample.add("f2.json", 10)
    run_to_end(options)
    _, (_, unread) = load_sinks(open_pipeline(options))
    assert (unread["epoch"], unread["next_try_at"]) == (None, None), "no run is alive"
    assert unread["last_known_epoch"] + unread["epochs_behind"] == 2, "by what the newest checkpoint knows"
    status = load_status(open_pipeline(options))
    assert status.sinks[1]["epochs_behind"] == unread["epochs_behind"] > 0
    sizes = [file.stat().st_size for file in outbox_files(tmp_path)]
    assert status.outbox == {"files": 2, "size_bytes": sum(sizes)}
    (tmp_path / f"copy.db{DOWN}").unlink()
    epoch, (table, copy) = load_sinks(open_pipeline(options))
    assert (epoch, table["decides"], table["epochs_behind"]) == (2, True, 0)
    assert (copy["epoch"], copy["epochs_behind"], copy["delivery"]) == (1, 1, "exactly-once")
    assert copy["bytes_behind"] > 0
    assert "is down" in copy["error"]


def test_a_run_reports_how_far_its_sinks_are_behind_and_when_it_tries_again(
    make_options: MakeOptions, sample: SampleInput, tmp_path: Path
) -> None:
    options = options_of(make_options, tmp_path, follower(tmp_path, required=False))
    down = tmp_path / f"copy.db{DOWN}"
    down.touch()
    sample.add("f1.json", 10)
    sample.add("f2.json", 10)
    lag = run_once(options).told.sink_lags[-1]
    assert lag == SinkLag("copy", 0, 2, sum(file.stat().st_size for file in outbox_files(tmp_path)))
    pipeline = open_pipeline(options)
    record = load_runs(pipeline.storage, "demo")[0]
    assert set(record["sinks_next_try"]) == {"copy"}
    alive = {**record, "status": "running", "host": "elsewhere", "updated_at": pipeline.clock.now().isoformat()}
    assert find_next_tries([alive]) == record["sinks_next_try"]
    down.unlink()
    assert run_once(options).told.sink_lags[-1] == SinkLag("copy", 2, 0, 0)


def test_a_savepoint_has_no_rows_of_followers_and_its_restore_leaves_them(
    make_options: MakeOptions, sample: SampleInput, tmp_path: Path
) -> None:
    options = options_of(make_options, tmp_path, follower(tmp_path))
    sample.add("f1.json", 3)
    run_to_end(options)
    create_savepoint(open_pipeline(options), str(tmp_path / "saved"), copy=True)
    sample.add("f2.json", 3)
    run_to_end(options)
    said: list[str] = []
    restore_savepoint(open_pipeline(options), str(tmp_path / "saved"), "person", report=said.append)
    assert any("copy keeps its rows" in line for line in said)
    assert table_ids(tmp_path / "table") == Counter([1, 2, 3])
    run_to_end(options)
    assert table_ids(tmp_path / "table") == sample.ids
    assert sqlite_ids(tmp_path / "copy.db") == sample.ids + Counter([4, 5, 6]), "read again after the restore"


def test_a_column_widens_for_followers_behind_a_journal(make_options: MakeOptions, tmp_path: Path) -> None:
    options = make_options(max_files=1, home=str(tmp_path / "home"), sinks=(follower(tmp_path),))
    (tmp_path / "in").mkdir()
    for number, price in enumerate((1, 2.5), start=1):
        (tmp_path / "in" / f"f{number}.json").write_text(f'{{"id": {number}, "price": {price}}}\n')
        run_to_end(options)
    assert {row["id"]: row["price"] for row in sqlite_rows(tmp_path / "copy.db")} == {1: 1, 2: 2.5}


@pytest.mark.parametrize("optional", [False, True])
def test_a_follower_that_goes_back_under_a_run_gets_what_it_lost_and_fences_nobody(
    make_options: MakeOptions,
    sample: SampleInput,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    optional: bool,
) -> None:
    commit, path = SqliteSink.commit, tmp_path / "copy.db"
    emptied: list[int] = []

    def empty_first(self: SqliteSink, epoch: EpochCommit, run_tasks: RunTasks | None = None) -> Receipt:
        if epoch.checkpoint.epoch == 2 and not emptied:
            emptied.append(2)
            path.unlink()
        return commit(self, epoch, run_tasks)

    monkeypatch.setattr(SqliteSink, "commit", empty_first)
    options = options_of(make_options, tmp_path, follower(tmp_path, required=not optional))
    sample.add("f1.json", 10)
    run_to_end(options)
    sample.add("f2.json", 10)
    run_to_end(options)
    run_to_end(options)  # an optional follower may still have rested
    assert emptied
    assert sqlite_ids(path) == sample.ids


@pytest.mark.parametrize("home", ["table", "journal"])
def test_gc_leaves_the_entries_of_epochs_that_a_follower_lacks(
    make_options: MakeOptions, sample: SampleInput, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, home: str
) -> None:
    down, sinks = tmp_path / f"copy.db{DOWN}", (follower(tmp_path, required=False),)
    tables = () if home == "journal" else (DeltaSinkOptions("table", str(tmp_path / "table")),)
    options = make_options(max_files=1, rollback_window=2, home=tmp_path / "home", sinks=(*tables, *sinks))
    sample.add("f00.json", 5)
    run_to_end(options)
    down.touch()
    for number in range(1, 10):
        sample.add(f"f{number:02d}.json", 5)
    run_to_end(options)
    monkeypatch.setattr("firnline.checkpoint.ledger.FOLD_ENTRIES", 4)
    assert gc(options.home.root, grace_seconds=0).entries_folded == 0
    down.unlink()
    run_to_end(options)
    assert sqlite_ids(tmp_path / "copy.db") == sample.ids
    swept = replace(options, outbox=OutboxOptions(keep=timedelta(0)))
    sample.add("f10.json", 5)
    run_to_end(swept)  # the checkpoint remembers that the follower has all of them
    for path in Path(options.home.root).rglob("outbox/*/*"):
        path.unlink()
    assert gc(options.home.root, grace_seconds=0).entries_folded > 0


def test_rows_that_wait_for_a_forgotten_follower_are_deleted(
    make_options: MakeOptions, sample: SampleInput, tmp_path: Path
) -> None:
    table = DeltaSinkOptions("table", str(tmp_path / "table"))
    options = make_options(max_files=1, sinks=(table, follower(tmp_path, required=False)))
    options = replace(options, outbox=OutboxOptions(keep=timedelta(0)))
    (tmp_path / f"copy.db{DOWN}").touch()
    sample.add("f1.json", 5)
    run_to_end(options)
    (waiting,) = (tmp_path / "table").rglob("outbox/*/*")
    other = SqliteSinkOptions("other", str(tmp_path / "other.db"))
    options = replace(options, sinks=(table, other))
    SinkEdit(open_pipeline(options), "forget", "copy").perform("person")
    for number in (2, 3):
        sample.add(f"f{number}.json", 5)
        run_to_end(options)
    assert not waiting.exists()
    assert sqlite_ids(tmp_path / "other.db") == sample.ids - Counter(range(1, 6))


@pytest.mark.parametrize("on_full", ["set_aside", "stop"])
def test_a_full_disk_gives_up_a_follower_that_lags_and_no_other(
    make_options: MakeOptions, sample: SampleInput, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, on_full: str
) -> None:
    """Giving up one that is only being delivered to would win nothing."""
    lags = SqliteSinkOptions("lags", str(tmp_path / "lags.db"), required=False)
    options = options_of(make_options, tmp_path, follower(tmp_path, required=False), lags)
    full = OutboxOptions(reserve=1 << 60, on_full=on_full)  # type: ignore[arg-type]
    for number in range(1, 7):
        sample.add(f"f{number}.json", 10)
    run_to_end(replace(options, outbox=full))
    for name in ("copy", "lags"):
        assert sqlite_ids(tmp_path / f"{name}.db") == sample.ids
    (tmp_path / f"lags.db{DOWN}").touch()
    sample.add("f7.json", 10)
    run_to_end(replace(options, outbox=full))
    monkeypatch.setattr("firnline.run.outbox.LAG", timedelta(0))
    sample.add("f8.json", 10)
    result = run_once(replace(options, outbox=full)).result
    if on_full == "stop":
        assert result.error is not None
        assert (result.exit_code, result.error.code) == (1, "outbox-full")
        (tmp_path / f"lags.db{DOWN}").unlink()
        run_to_end(options)
        assert sqlite_ids(tmp_path / "lags.db") == sample.ids
    else:
        assert result.exit_code == 0
        assert find_away(open_pipeline(options).load().checkpoint, options.followers).keys() == {"lags"}
    run_to_end(options)
    assert sqlite_ids(tmp_path / "copy.db") == sample.ids
