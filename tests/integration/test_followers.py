"""Followers: sinks that are delivered from the outbox, in runs with a Delta table that decides."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest

from firnline.errors import RollbackRefusedError
from firnline.history.edits.rollback import Rollback
from firnline.options import PipelineOptions
from firnline.run.open_pipeline import open_pipeline
from firnline.sinks.dead_letters import list_dead_letters, read_letters
from firnline.sinks.delta.options import DeltaSinkOptions
from firnline.testing.sinks import OpenSink, ReadRows, SinkConformance
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
    from datetime import timedelta

    from firnline.options import OutboxOptions

    options = options_of(make_options, tmp_path, follower(tmp_path))
    sample.add("f1.json", 3)
    run_to_end(options)
    assert len(outbox_files(tmp_path)) == 1
    for number in range(2, 4):
        sample.add(f"f{number}.json", 3)
    run_to_end(replace(options, outbox=OutboxOptions(keep=timedelta(0))))
    assert len(outbox_files(tmp_path)) < 3
