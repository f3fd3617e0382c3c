"""Followers that lag, were renamed or hold part of an epoch when the history is edited: nothing is lost or doubled."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from firnline.errors import ConfigError, RollbackRefusedError, SinkDivergedError, SinkError
from firnline.history.edits.fresh_start import start_over
from firnline.history.edits.restore import restore_savepoint
from firnline.history.edits.rollback import Rollback
from firnline.history.edits.sinks import SinkEdit
from firnline.history.savepoints.create import create_savepoint
from firnline.options import OutboxOptions, PipelineOptions
from firnline.run.open_pipeline import open_pipeline
from firnline.sinks.delta.options import DeltaSinkOptions
from firnline.sinks.known import find_away
from firnline.testing.faults import failing_at
from tests.support.pipelines import MakeOptions, run_once, run_to_end
from tests.support.samples import SampleInput, table_ids
from tests.support.sqlite_sink import DOWN, SqliteSink, SqliteSinkOptions, register_sqlite, sqlite_ids, sqlite_rows


@pytest.fixture(autouse=True)
def kind(monkeypatch: pytest.MonkeyPatch) -> None:
    register_sqlite(monkeypatch)


@pytest.fixture
def options(make_options: MakeOptions, tmp_path: Path) -> PipelineOptions:
    """A table, and an optional follower."""
    copy = SqliteSinkOptions("copy", str(tmp_path / "copy.db"), required=False)
    return make_options(max_files=1, sinks=(DeltaSinkOptions("table", str(tmp_path / "table")), copy))


def lag(options: PipelineOptions, sample: SampleInput, tmp_path: Path, files: int = 2) -> None:
    """Run epochs that the follower does not get."""
    down = tmp_path / f"copy.db{DOWN}"
    down.touch()
    for number in range(files):
        sample.add(f"lag{number}.json", 5)
    run_to_end(options)
    down.unlink()


def renamed(options: PipelineOptions, name: str, renamed_from: str = "") -> PipelineOptions:
    table, copy = options.sinks
    return replace(options, sinks=(table, replace(copy, name=name, renamed_from=renamed_from)))  # type: ignore[call-arg]


def test_a_follower_that_lags_at_a_restore_gets_the_epochs_before_the_savepoint(
    options: PipelineOptions, sample: SampleInput, tmp_path: Path
) -> None:
    sample.add("a.json", 5)
    run_to_end(options)
    lag(options, sample, tmp_path)
    create_savepoint(open_pipeline(options), str(tmp_path / "saved"), copy=True)
    restore_savepoint(open_pipeline(options), str(tmp_path / "saved"), "person")
    for _ in range(2):
        run_to_end(options)
    assert sqlite_ids(tmp_path / "copy.db") == table_ids(tmp_path / "table") == sample.ids


def test_a_fresh_start_is_refused_while_a_follower_lags(
    options: PipelineOptions, sample: SampleInput, tmp_path: Path
) -> None:
    sample.add("a.json", 5)
    run_to_end(options)
    lag(options, sample, tmp_path)
    with pytest.raises(RollbackRefusedError, match="still waits for epochs up to 3"):
        start_over(open_pipeline(options), 3, "person")
    for _ in range(2):
        run_to_end(options)
    assert sqlite_ids(tmp_path / "copy.db") == sample.ids


def test_a_table_that_lags_is_not_copied(make_options: MakeOptions, sample: SampleInput, tmp_path: Path) -> None:
    tables = (
        DeltaSinkOptions("table", str(tmp_path / "table")),
        DeltaSinkOptions("second", str(tmp_path / "second"), required=False),
    )
    alone = make_options(max_files=1, sinks=tables)
    sample.add("a.json", 5)
    run_to_end(alone)
    (tmp_path / "second").rename(tmp_path / "away")
    (tmp_path / "second").touch()
    sample.add("b.json", 5)
    run_to_end(alone)
    (tmp_path / "second").unlink()
    (tmp_path / "away").rename(tmp_path / "second")
    options = replace(alone, sinks=(*tables, SqliteSinkOptions("copy", str(tmp_path / "copy.db"))))
    with pytest.raises(SinkError, match="'second' holds epoch 1, and epoch 2 is decided"):
        SinkEdit(open_pipeline(options), "resync", "copy", "second").perform("person")


def test_a_copy_that_a_rollback_undoes_sets_its_sink_aside(
    make_options: MakeOptions, sample: SampleInput, tmp_path: Path
) -> None:
    alone = make_options(max_files=1, sinks=(DeltaSinkOptions("table", str(tmp_path / "table")),))
    sample.add("a.json", 5)
    run_to_end(alone)
    copy = SqliteSinkOptions("copy", str(tmp_path / "copy.db"), copy_from="table")
    options = replace(alone, sinks=(*alone.sinks, copy))
    SinkEdit(open_pipeline(options), "resync", "copy").perform("person")
    Rollback(open_pipeline(options), 1).perform("person")
    away = find_away(open_pipeline(options).load().checkpoint, options.followers)
    assert "undid its copy" in away["copy"]
    SinkEdit(open_pipeline(options), "resync", "copy").perform("person")
    run_to_end(options)
    assert sqlite_ids(tmp_path / "copy.db") == sample.ids


def test_a_sink_that_the_spec_still_has_is_not_forgotten(
    options: PipelineOptions, sample: SampleInput, tmp_path: Path
) -> None:
    sample.add("a.json", 5)
    run_to_end(options)
    lag(options, sample, tmp_path)
    with pytest.raises(ConfigError, match="the spec still has the sink 'copy'"):
        SinkEdit(open_pipeline(options), "forget", "copy").perform("person")


def test_a_renamed_follower_behind_a_journal_gets_what_it_lacks_before_a_rollback(
    make_options: MakeOptions, sample: SampleInput, tmp_path: Path
) -> None:
    copy = SqliteSinkOptions("copy", str(tmp_path / "copy.db"), required=False)
    options = make_options(max_files=1, home=str(tmp_path / "home"), sinks=(copy,))
    sample.add("a.json", 5)
    run_to_end(options)
    lag(options, sample, tmp_path, files=3)
    other = replace(options, sinks=(replace(copy, name="other", renamed_from="copy"),))
    Rollback(open_pipeline(other), 3).perform("person")
    for _ in range(2):
        run_to_end(other)
    assert sqlite_ids(tmp_path / "copy.db") == sample.ids


def test_a_savepoint_in_another_table_does_not_take_the_target_over(
    options: PipelineOptions, sample: SampleInput, tmp_path: Path
) -> None:
    sample.add("a.json", 5)
    run_to_end(options)
    create_savepoint(open_pipeline(options), str(tmp_path / "saved"), copy=True)
    elsewhere = replace(options, sinks=(DeltaSinkOptions("table", str(tmp_path / "b")), options.sinks[1]))
    with pytest.raises(SinkDivergedError, match="belongs to another pipeline"):
        restore_savepoint(open_pipeline(elsewhere), str(tmp_path / "saved"), "person")
    sample.add("b.json", 5)
    run_to_end(options)
    assert sqlite_ids(tmp_path / "copy.db") == sample.ids


def test_a_sink_that_is_renamed_back_goes_on_and_a_forgotten_rename_is_refused(
    options: PipelineOptions, sample: SampleInput, tmp_path: Path
) -> None:
    for number, one in enumerate((options, renamed(options, "other", "copy"), options)):
        sample.add(f"{number}.json", 5)
        run_to_end(one)
        assert sqlite_ids(tmp_path / "copy.db") == sample.ids
    run_to_end(renamed(options, "third", "copy"))
    for wrong in (renamed(options, "third"), renamed(options, "copy", "third")):
        sample.add(f"{wrong.sinks[1].name}.json", 5)
        ended = run_once(wrong).result
        assert ended.exit_code == 2
        assert ended.error is not None
        assert "knows it as 'copy'" in ended.error.message
    run_to_end(options)
    assert sqlite_ids(tmp_path / "copy.db") == sample.ids


def test_a_rollback_below_a_part_of_an_epoch_needs_leave(
    options: PipelineOptions, sample: SampleInput, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    table, copy = options.sinks
    options = replace(options, sinks=(table, replace(copy, ranges=True, required=True)))  # type: ignore[call-arg]
    sample.add("a.json", 5)
    run_to_end(options)
    sample.add("b.json", 250)
    writes = iter(range(100))
    write = SqliteSink._write

    def fail_after_one(self: object, *arguments: object) -> object:
        if next(writes) >= 1:
            raise SinkError("away")
        return write(self, *arguments)  # type: ignore[arg-type]

    with monkeypatch.context() as patch:
        patch.setattr(SqliteSink, "_write", fail_after_one)
        assert run_once(options).exit_code != 0
    held = len(sqlite_rows(tmp_path / "copy.db"))
    assert 5 < held < 255
    with pytest.raises(RollbackRefusedError, match="copy cannot take rows back"):
        Rollback(open_pipeline(options), 1).perform("person")
    run_to_end(options)
    assert sqlite_ids(tmp_path / "copy.db") == sample.ids


@pytest.mark.parametrize("edit", ["policy", "name"])
def test_a_dead_letter_stays_one_when_the_spec_is_edited_before_the_head_moves(
    options: PipelineOptions, sample: SampleInput, tmp_path: Path, edit: str
) -> None:
    table, copy = options.sinks
    bad = replace(copy, required=True, refused=3, on_bad_row="dead_letter")  # type: ignore[call-arg]
    sample.add("a.json", 5)
    with failing_at("letter.put.after"):
        assert run_once(replace(options, sinks=(table, bad))).exit_code in (0, 1, 3)
    changes: dict[str, Any] = {"on_bad_row": "stop"} if edit == "policy" else {"name": "new", "renamed_from": "copy"}
    run_to_end(replace(options, sinks=(table, replace(bad, refused=None, **changes))))  # type: ignore[call-arg]
    assert sqlite_ids(tmp_path / "copy.db") == sample.ids - Counter([3])


def test_a_sink_that_is_set_aside_stays_so_under_another_name(
    options: PipelineOptions, sample: SampleInput, tmp_path: Path
) -> None:
    small = replace(options, outbox=OutboxOptions(max_bytes=1))
    sample.add("a.json", 5)
    run_to_end(small)
    held = sqlite_ids(tmp_path / "copy.db")
    lag(small, sample, tmp_path, files=3)
    other = renamed(small, "other", "copy")
    sample.add("z.json", 5)
    run_to_end(other)
    assert sqlite_ids(tmp_path / "copy.db") == held
    assert find_away(open_pipeline(other).load().checkpoint, other.followers).keys() == {"other"}
