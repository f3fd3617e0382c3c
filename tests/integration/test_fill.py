"""Sinks that are added to a pipeline with history and get what was before: from the beginning, or by a copy."""

from __future__ import annotations

import sqlite3
import threading
from collections import Counter
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from firnline.errors import FirnlineError, RollbackRefusedError, SinkError
from firnline.history.edits.rollback import Rollback
from firnline.history.edits.sinks import SinkEdit
from firnline.history.sinks import load_sinks
from firnline.options import OutboxOptions, PipelineOptions, StoreOptions
from firnline.run.open_pipeline import open_pipeline
from firnline.run.runner import Runner
from firnline.sinks.delta.options import DeltaSinkOptions
from firnline.sinks.follower import EpochDelivery, FollowerHead
from firnline.sinks.kafka.sink import KafkaSink
from firnline.sinks.known import find_filling, known_sinks
from firnline.stores import open_store
from firnline.testing.local import LocalEngine
from tests.support.kafka import KafkaServer
from tests.support.kafka_sinks import kafka_sink, topic_ids
from tests.support.keyed import TOTALS, KeyedInput, keyed_options, run_epochs
from tests.support.pipelines import MakeOptions, make_epochs, run_once, run_to_end
from tests.support.processes import wait_until
from tests.support.samples import SampleInput, table_ids
from tests.support.sqlite_sink import DOWN, SqliteSink, SqliteSinkOptions, register_sqlite, sqlite_ids, sqlite_rows

WAYS: dict[str, dict[str, Any]] = {"beginning": {"start": "beginning"}, "copy": {"copy_from": "table"}}


@pytest.fixture(autouse=True)
def kind(monkeypatch: pytest.MonkeyPatch) -> None:
    register_sqlite(monkeypatch)


@pytest.fixture
def alone(make_options: MakeOptions, tmp_path: Path) -> PipelineOptions:
    """A table."""
    return make_options(max_files=1, sinks=(DeltaSinkOptions("table", str(tmp_path / "table")),))


def with_copy(alone: PipelineOptions, folder: Path, **settings: Any) -> PipelineOptions:
    return replace(alone, sinks=(*alone.sinks, SqliteSinkOptions("copy", str(folder / "copy.db"), **settings)))


def filling(options: PipelineOptions) -> set[str]:
    return set(find_filling(open_pipeline(options).load().checkpoint, options.followers))


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("ranges", [False, True], ids=["whole", "ranges"])
def test_a_new_sink_gets_what_was_before_and_every_later_epoch(
    alone: PipelineOptions, sample: SampleInput, tmp_path: Path, way: str, ranges: bool
) -> None:
    for number in range(3):
        sample.add(f"{number}.json", 150, bad=1)
    run_to_end(alone)
    options = with_copy(alone, tmp_path, ranges=ranges, **WAYS[way])
    run_to_end(options)
    assert sqlite_ids(tmp_path / "copy.db") == sample.ids
    for number in range(3, 5):
        sample.add(f"{number}.json", 150)
        run_to_end(options)
    assert sqlite_ids(tmp_path / "copy.db") == table_ids(tmp_path / "table") == sample.ids
    if way == "beginning":
        assert [row["id"] for row in sqlite_rows(tmp_path / "copy.db")] == sorted(sample.ids), "in order"
    assert filling(options) == set()
    assert not [path for path in (tmp_path / "table" / "_firnline" / "demo" / "rerun").rglob("*") if path.is_file()]
    run_to_end(options)
    assert sqlite_ids(tmp_path / "copy.db") == sample.ids


def test_a_sink_from_the_beginning_has_the_ids_of_the_epochs(
    alone: PipelineOptions, sample: SampleInput, tmp_path: Path
) -> None:
    both = replace(alone, sinks=(*alone.sinks, SqliteSinkOptions("first", str(tmp_path / "first.db"))))
    for number in range(3):
        sample.add(f"{number}.json", 20)
    run_to_end(both)
    run_to_end(with_copy(both, tmp_path, start="beginning"))
    assert _with_ids(tmp_path / "copy.db") == _with_ids(tmp_path / "first.db")


def _with_ids(path: Path) -> list[tuple[str, str]]:
    with closing(sqlite3.connect(path)) as connection:
        return sorted(connection.execute("SELECT id, record FROM rows").fetchall())


@pytest.mark.parametrize("way", WAYS)
def test_a_sink_that_is_to_be_filled_and_is_down_stops_nobody(
    alone: PipelineOptions, sample: SampleInput, tmp_path: Path, way: str
) -> None:
    sample.add("a.json", 10)
    run_to_end(alone)
    down = tmp_path / f"copy.db{DOWN}"
    down.touch()
    options = replace(with_copy(alone, tmp_path, **WAYS[way]), outbox=OutboxOptions(max_bytes=1))
    for number in range(3):
        sample.add(f"{number}.json", 10)
        assert run_once(options).exit_code == 0, "it is required, and counts in no policy yet"
    assert filling(options) == {"copy"}
    _, rows = load_sinks(open_pipeline(options))
    assert next(row for row in rows if row["name"] == "copy")["filled_from"] == (
        "the beginning" if way == "beginning" else "table"
    )
    down.unlink()
    run_to_end(options)
    assert sqlite_ids(tmp_path / "copy.db") == table_ids(tmp_path / "table") == sample.ids
    sample.add("y.json", 10)
    run_to_end(options)
    assert filling(options) == set()
    down.touch()
    sample.add("z.json", 10)
    assert run_once(options).exit_code == 3, "it counts from now on"
    down.unlink()
    run_to_end(options)
    assert sqlite_ids(tmp_path / "copy.db") == sample.ids


def test_a_copy_is_the_table_as_it_was_when_the_sink_was_added(
    alone: PipelineOptions, sample: SampleInput, tmp_path: Path
) -> None:
    make_epochs(sample, alone, 2)
    options = with_copy(alone, tmp_path, copy_from="table", required=False)
    (tmp_path / f"copy.db{DOWN}").touch()
    for number in range(2):
        sample.add(f"later{number}.json", 7)
        run_to_end(options)
    (tmp_path / f"copy.db{DOWN}").unlink()
    run_to_end(options)
    assert sqlite_ids(tmp_path / "copy.db") == table_ids(tmp_path / "table") == sample.ids


def refusal(options: PipelineOptions) -> FirnlineError:
    result = run_once(options).result
    assert result.error is not None
    assert result.exit_code == 2
    return result.error


def test_a_start_at_the_beginning_is_refused_with_the_reason(
    alone: PipelineOptions, sample: SampleInput, tmp_path: Path
) -> None:
    make_epochs(sample, alone, 2)
    first = sorted(sample.folder.iterdir())[0]
    options = with_copy(alone, tmp_path, start="beginning")
    moved = first.rename(tmp_path / "elsewhere")
    error = refusal(options)
    assert "cannot start at the beginning: the input can no longer be read" in error.message
    assert first.name in error.message
    assert "`copy_from`" in error.hint
    assert "firnline sinks resync copy --from table --yes" in error.hint
    assert not (tmp_path / "copy.db").exists()
    moved.rename(first)
    Rollback(open_pipeline(alone), 1).perform("person")
    assert "is a rollback, which no new sink can follow" in refusal(options).message


def test_an_operator_with_state_cannot_start_at_the_beginning(keyed: KeyedInput, tmp_path: Path) -> None:
    alone = keyed_options(tmp_path)
    run_epochs(keyed, alone, 2)
    copy = SqliteSinkOptions("copy", str(tmp_path / "copy.db"), input=TOTALS.name, start="beginning")
    assert "which keeps state" in refusal(replace(alone, sinks=(*alone.sinks, copy))).message
    appended = replace(copy, start="now", copy_from="delta")
    assert (
        "cannot be copied from 'delta' (`write: upsert`)"
        in refusal(replace(alone, sinks=(*alone.sinks, appended))).message
    )


def test_a_table_with_another_input_is_not_copied(alone: PipelineOptions, sample: SampleInput, tmp_path: Path) -> None:
    make_epochs(sample, alone, 1)
    assert "cannot be copied from 'nobody'" in refusal(with_copy(alone, tmp_path, copy_from="nobody")).message


def test_a_target_of_an_earlier_life_is_not_filled(alone: PipelineOptions, sample: SampleInput, tmp_path: Path) -> None:
    now = with_copy(alone, tmp_path)
    make_epochs(sample, alone, 1)
    sample.add("x.json", 5)
    run_to_end(now)
    held = sqlite_ids(tmp_path / "copy.db")
    SinkEdit(open_pipeline(alone), "forget", "copy").perform("person")
    options = with_copy(alone, tmp_path, start="beginning")
    run = run_once(options)
    assert run.exit_code == 0, "it counts in no policy"
    assert sqlite_ids(tmp_path / "copy.db") == held
    assert filling(options) == {"copy"}
    SinkEdit(open_pipeline(options), "resync", "copy").perform("person")
    (tmp_path / "copy.db").unlink()
    run_to_end(options)
    assert sqlite_ids(tmp_path / "copy.db") == table_ids(tmp_path / "table")


@pytest.mark.parametrize("way", WAYS)
def test_the_history_is_not_edited_while_a_sink_is_filled(
    alone: PipelineOptions, sample: SampleInput, tmp_path: Path, way: str
) -> None:
    make_epochs(sample, alone, 2)
    options = with_copy(alone, tmp_path, required=False, **WAYS[way])
    (tmp_path / f"copy.db{DOWN}").touch()
    run_to_end(options)
    with pytest.raises(RollbackRefusedError):
        Rollback(open_pipeline(options), 1).perform("person")
    (tmp_path / f"copy.db{DOWN}").unlink()
    with pytest.raises(RollbackRefusedError, match="is being filled" if way == "beginning" else "copy"):
        Rollback(open_pipeline(options), 1).perform("person")
    run_to_end(options)
    assert sqlite_ids(tmp_path / "copy.db") == sample.ids


def test_two_sinks_are_filled_beside_each_other(alone: PipelineOptions, sample: SampleInput, tmp_path: Path) -> None:
    make_epochs(sample, alone, 3)
    other = SqliteSinkOptions("other", str(tmp_path / "other.db"), copy_from="table")
    options = with_copy(alone, tmp_path, start="beginning")
    options = replace(options, sinks=(*options.sinks, other))
    sample.add("more.json", 5)
    run_to_end(options)
    assert sqlite_ids(tmp_path / "copy.db") == sqlite_ids(tmp_path / "other.db") == sample.ids
    known = known_sinks(open_pipeline(options).load().checkpoint)
    assert {name: one.born for name, one in known.items()} == {"copy": 0, "other": 3}


def test_a_pipeline_without_history_has_nothing_to_fill(
    alone: PipelineOptions, sample: SampleInput, tmp_path: Path
) -> None:
    sample.add("a.json", 5)
    options = with_copy(alone, tmp_path, copy_from="table")
    run_to_end(options)
    assert sqlite_ids(tmp_path / "copy.db") == sample.ids == Counter(sample.ids)
    assert open_pipeline(options).load().epoch == 1


@pytest.mark.kafka
def test_a_topic_with_lanes_is_filled_and_repaired(
    alone: PipelineOptions, sample: SampleInput, kafka: KafkaServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    topic = kafka.new_topic(2)
    for number in range(2):
        sample.add(f"{number}.json", 40)
    run_to_end(alone)
    sink = kafka_sink(kafka, topic, lanes=2, start="beginning", required=False)
    options = replace(alone, sinks=(*alone.sinks, sink))
    sample.add("2.json", 40)
    run_to_end(options)
    assert topic_ids(kafka, topic) == sample.ids, "in order per key, too"

    def refuse(*_: object) -> None:
        raise SinkError("it is away")

    with monkeypatch.context() as patched:
        patched.setattr(KafkaSink, "deliver", refuse)
        sample.add("3.json", 40)
        run_to_end(options)
    for path in (tmp_path / "table").rglob("outbox/**/*.arrow"):
        path.write_bytes(path.read_bytes()[:-9])
    run_to_end(options)
    assert topic_ids(kafka, topic) == sample.ids


def test_the_epoch_that_decides_it_is_recorded_like_any_other(
    alone: PipelineOptions, sample: SampleInput, tmp_path: Path
) -> None:
    store = StoreOptions(path=str(tmp_path / "store"))
    alone = replace(alone, checkpoint=replace(alone.checkpoint, store=store))
    make_epochs(sample, alone, 2)
    options = with_copy(alone, tmp_path, start="beginning")
    run_to_end(options)
    assert open_pipeline(options).load().epoch == 3
    with closing(open_store(store, held_by="table", read_only=True)) as opened:
        assert len(opened.list_versions("demo")) == 3
    sample.add("more.json", 5)
    run_to_end(options)
    assert sqlite_ids(tmp_path / "copy.db") == sample.ids


def test_the_others_go_on_while_a_sink_is_filled(
    alone: PipelineOptions, sample: SampleInput, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_epochs(sample, alone, 2)
    options = with_copy(alone, tmp_path, start="beginning")
    deliver, is_held = SqliteSink.deliver, threading.Event()
    held = threading.Event()

    def wait_for_others(self: SqliteSink, delivery: EpochDelivery) -> FollowerHead:
        is_held.set()
        assert held.wait(120)
        return deliver(self, delivery)

    monkeypatch.setattr(SqliteSink, "deliver", wait_for_others)
    runner = Runner(open_pipeline(options), LocalEngine())
    thread = threading.Thread(target=runner.run)
    thread.start()
    try:
        assert is_held.wait(120)
        for number in range(2):
            before = open_pipeline(options).load().epoch
            sample.add(f"more{number}.json", 5)
            wait_until(lambda before=before: open_pipeline(options).load().epoch > before)  # type: ignore[misc]
        assert sqlite_rows(tmp_path / "copy.db") == []
        held.set()
        wait_until(lambda: sqlite_ids(tmp_path / "copy.db") == sample.ids)
    finally:
        held.set()
        runner.stop()
        thread.join(120)
    assert table_ids(tmp_path / "table") == sample.ids
