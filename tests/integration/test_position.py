"""Positions that a person sets, and input that a person skips: files, Kafka, Delta, with all kinds of sinks behind."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from deltalake import DeltaTable

from firnline.cli.main import run_command
from firnline.errors import CheckpointError, ConfigError, SourceGapError
from firnline.history.edits.position import Action, PositionEdit, PositionPlan
from firnline.history.edits.rollback import Rollback
from firnline.options import BatchOptions, PipelineOptions, StoreOptions
from firnline.run.open_pipeline import open_pipeline
from firnline.sinks.delta.options import DeltaSinkOptions
from firnline.sources.base import Source
from firnline.sources.delta.options import DeltaSourceOptions
from firnline.sources.kafka.options import KafkaSourceOptions
from firnline.stores import open_store
from firnline.stores.audit import load_audit
from firnline.testing.local import run_locally
from tests.support.kafka import KafkaServer
from tests.support.pipelines import MakeOptions, make_epochs, pipeline_options, run_to_end, run_until_epoch
from tests.support.samples import SampleInput, table_ids
from tests.support.sqlite_sink import SqliteSinkOptions, register_sqlite, sqlite_ids


def change(options: PipelineOptions, action: Action, words: str, source: str = "files") -> PositionPlan:
    plan, _ = PositionEdit(open_pipeline(options), action, source, words).perform("person")
    return plan


@pytest.fixture
def options(make_options: MakeOptions, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> PipelineOptions:
    """Files into a table and a follower; a store with the audit trail."""
    register_sqlite(monkeypatch)
    sinks = (DeltaSinkOptions("table", str(tmp_path / "table")), SqliteSinkOptions("copy", str(tmp_path / "copy.db")))
    return make_options(max_files=1, sinks=sinks, store=StoreOptions(path=str(tmp_path / "store")))


def both(options: PipelineOptions) -> Counter[int]:
    """What the sinks hold, read by DuckDB and by sqlite3."""
    table, copy = (Path(sink.location) for sink in options.sinks)
    assert table_ids(table) == sqlite_ids(copy)
    return table_ids(table)


def ids_of(path: Path) -> Counter[int]:
    return Counter(json.loads(line)["id"] for line in path.read_text().splitlines())


# -- files --------------------------------------------------------------------------------------------


def test_files_before_a_mark_are_never_read_and_never_come_late(
    options: PipelineOptions, sample: SampleInput, tmp_path: Path
) -> None:
    make_epochs(sample, options, 2)
    lost = [sample.add(f"g{number}.json", 3) for number in range(3)]
    kept = sample.add("h.json", 3)
    plan = change(options, "set", "g2.json")
    assert (plan.epoch, plan.new_epoch) == (2, 3)
    assert plan.never == [str(path) for path in lost]
    assert (plan.again, plan.never_count, plan.unit, plan.doubled_in) == ([], 3, "file", [])
    for _ in range(2):  # late files are looked for in every run
        run_to_end(options)
    expected = sample.ids - ids_of(lost[0]) - ids_of(lost[1]) - ids_of(lost[2])
    assert both(options) == expected
    assert ids_of(kept) <= expected
    assert change(options, "set", str(kept)).already
    records = [
        (record.record.what, record.record.outcome, record.record.details.get("words"))
        for record in load_audit(open_store(options.checkpoint.store, held_by="test"), options.name)  # type: ignore[arg-type]
        if record.record is not None
    ]
    assert ("position-set", "done", "g2.json") in records


def test_files_after_an_earlier_mark_are_read_again(options: PipelineOptions, sample: SampleInput) -> None:
    make_epochs(sample, options, 3)
    plan = change(options, "set", "f001.json")
    assert plan.again == [str(sample.path(f"f00{number}.json")) for number in (2, 3)]
    assert plan.doubled_in == ["table", "copy"]
    run_to_end(options)
    twice = ids_of(sample.path("f002.json")) + ids_of(sample.path("f003.json"))
    assert both(options) == sample.ids + twice
    make_epochs(sample, options, 1, first=4)
    assert both(options) == sample.ids + twice, "nothing comes a third time"
    assert change(options, "set", "beginning").again_count == 4
    run_to_end(options)
    assert both(options) == sample.ids + sample.ids + twice
    assert change(options, "set", "end").already


def test_one_file_is_skipped_and_those_before_it_are_not(options: PipelineOptions, sample: SampleInput) -> None:
    make_epochs(sample, options, 1)
    for name in ("g1", "g2", "g3", "g4"):
        sample.add(f"{name}.json", 3)
    gone = ids_of(sample.path("g3.json"))
    plan = change(options, "skip", "g3.json")
    assert (plan.never, plan.again) == ([str(sample.path("g3.json"))], [])
    assert change(options, "skip", "g3.json").already
    sample.add("g25.json", 3)  # between: it is not passed
    for _ in range(2):
        run_to_end(options)
    assert both(options) == sample.ids - gone
    assert change(options, "skip", "g3.json").already
    with pytest.raises(ConfigError, match="has no file"):
        change(options, "skip", "nowhere.json")


def test_a_rollback_undoes_a_skip(options: PipelineOptions, sample: SampleInput) -> None:
    make_epochs(sample, options, 1)
    sample.add("g1.json", 3)
    change(options, "skip", "g1.json")
    Rollback(open_pipeline(options), 1, leave=["copy"]).perform("person")
    run_to_end(options)
    assert both(options) == sample.ids


def test_the_rest_of_a_file_is_skipped(make_options: MakeOptions, sample: SampleInput, tmp_path: Path) -> None:
    options = make_options(max_events=4)
    path = sample.add("a.json", 10)
    run_until_epoch(options, 1)
    plan = change(options, "skip", "a.json")
    held = table_ids(options.sinks[0].location)
    assert 0 < len(held) < 10
    assert plan.never == [f"{path}, after record {len(held)}"]
    for _ in range(2):
        run_to_end(options)
    assert table_ids(options.sinks[0].location) == held


def test_what_is_wrong_is_refused_with_the_way_out(options: PipelineOptions, sample: SampleInput) -> None:
    with pytest.raises(ConfigError, match="has no history yet"):
        change(options, "set", "end")
    make_epochs(sample, options, 1)
    for words, message in (
        ("/elsewhere/a.json", "is not in it"),
        ('{"some": 1}', "this is no position"),
        ("{", "this is no position"),
    ):
        with pytest.raises(ConfigError, match=message):
            change(options, "set", words)
    with pytest.raises(ConfigError, match="no source 'file'") as caught:
        change(options, "set", "end", source="file")
    assert "'files'" in caught.value.hint
    position = open_pipeline(options).load().checkpoint.positions["files"]  # type: ignore[union-attr]
    assert change(options, "set", json.dumps(position)).already
    with pytest.raises(ConfigError, match="names /elsewhere"):
        change(options, "set", json.dumps({**position, "root": "/elsewhere"}))


def test_a_plan_that_is_out_of_date_changes_nothing(options: PipelineOptions, sample: SampleInput) -> None:
    make_epochs(sample, options, 1)
    sample.add("g1.json", 3)
    edit = PositionEdit(open_pipeline(options), "set", "files", "end")
    read = edit._read
    calls = iter(range(10))

    def overtaken() -> Any:
        if next(calls) == 1:  # after the plan, under the claim
            sample.add("g2.json", 3)
        return read()

    edit._read = overtaken  # type: ignore[method-assign]
    with pytest.raises(CheckpointError, match="moved since the plan"):
        edit.perform("person")
    run_to_end(options)
    assert both(options) == sample.ids


def test_a_source_that_cannot_refuses_by_name() -> None:
    names = ("start", "plan", "advance", "replay", "replan", "backlog")
    source: Source = type("Own", (Source,), dict.fromkeys(names))()
    source.name = "own"
    for call in (source.set_position, source.skip):
        with pytest.raises(ConfigError, match="source 'own' cannot"):
            call({}, "end")


def test_the_command_shows_a_plan_and_asks(
    sample: SampleInput, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    spec = tmp_path / "firnline.yml"
    spec.write_text(
        "name: flights\nsources:\n  flights: {type: files, path: in, min_age_secs: 0}\nsinks:\n"
        "  - {type: delta, table: out}\n"
    )
    monkeypatch.chdir(tmp_path)
    from firnline.spec.build import load_options

    loaded = load_options(spec, environ={})
    make_epochs(sample, loaded, 2)
    command = ["position", "set", "flights", "f001.json"]
    assert run_command(command) == 2  # nobody to ask
    told = capsys.readouterr().out
    assert "read again" in told
    assert "doubled in: out" in told or "doubled in: delta" in told
    assert run_command([*command, "--dry-run"]) == 0
    capsys.readouterr()
    assert run_command([*command, "--yes", "--json"]) == 0
    body = json.loads(capsys.readouterr().out)
    assert body["done"] is True
    assert body["new_epoch"] == 3
    assert run_command(["position", "show", "--json"]) == 0
    shown = json.loads(capsys.readouterr().out)
    assert shown["epoch"] == 3
    assert shown["sources"]["flights"]["position"] == body["after"]
    assert run_command(["position", "show"]) == 0
    assert "f001.json" in capsys.readouterr().out


# -- kafka --------------------------------------------------------------------------------------------


def kafka_options(kafka: KafkaServer, topic: str, folder: Path, **settings: Any) -> PipelineOptions:
    source = KafkaSourceOptions("events", brokers=kafka.bootstrap, topics=(topic,), **settings)
    batch = BatchOptions(max_events=100_000, max_bytes=64 << 20, max_ms=20)
    return PipelineOptions("p", (source,), (DeltaSinkOptions("out", str(folder / "out")),), batch=batch)


def numbers(first: int, count: int) -> list[str]:
    return [json.dumps({"id": number}) for number in range(first, first + count)]


@pytest.mark.kafka
def test_offsets_are_set_and_skipped(kafka: KafkaServer, tmp_path: Path) -> None:
    topic = kafka.new_topic(2)
    options = kafka_options(kafka, topic, tmp_path)
    for partition in range(2):
        kafka.produce(topic, numbers(100 * partition, 10), partition=partition)
    run_locally(options)
    expected = Counter([*range(10), *range(100, 110)])
    assert table_ids(tmp_path / "out") == expected
    plan = change(options, "set", f"{topic}:0=7", "events")
    assert plan.again == [f"{topic}/0 offsets 7 to 9"]
    assert (plan.again_count, plan.never, plan.unit, plan.doubled_in) == (3, [], "offset", ["out"])
    run_locally(options)
    expected += Counter([7, 8, 9])
    assert table_ids(tmp_path / "out") == expected
    for partition in range(2):
        kafka.produce(topic, numbers(100 * partition + 10, 10), partition=partition)
    plan = change(options, "skip", f"{topic}:0+4,{topic}:1=15", "events")
    assert plan.never == [f"{topic}/0 offsets 10 to 13", f"{topic}/1 offsets 10 to 14"]
    assert (plan.never_count, plan.again) == (9, [])
    assert change(options, "skip", f"{topic}:0+4,{topic}:1=15", "events").already, "a repeated command skips no more"
    run_locally(options)
    expected += Counter([*range(14, 20), *range(115, 120)])
    assert table_ids(tmp_path / "out") == expected
    assert change(options, "set", "end", "events").already
    assert change(options, "set", "beginning", "events").again_count == 40
    change(options, "set", "end", "events")
    run_locally(options)
    assert table_ids(tmp_path / "out") == expected
    stored = open_pipeline(options).load().checkpoint.positions["events"]  # type: ignore[union-attr]
    assert change(options, "set", json.dumps(stored), "events").already
    for words, message in (
        (f"{topic}:0=99", "is not there"),
        (f"{topic}:7=1", "reads no partition"),
        ("soon", "no position 'soon'"),
        (f"5,{topic}:0=1", "no position '5'"),
        ("{}", "this is no position"),
    ):
        with pytest.raises(ConfigError, match=message):
            change(options, "set", words, "events")
    for words, message in (
        (f"{topic}:0", "cannot skip"),
        (f"{topic}:0+1", "1 offsets cannot be skipped; 0 are unread"),
    ):
        with pytest.raises(ConfigError, match=message):
            change(options, "skip", words, "events")


@pytest.mark.kafka
def test_a_time_is_a_position(kafka: KafkaServer, tmp_path: Path) -> None:
    topic = kafka.new_topic(retention_ms=-1)
    options = kafka_options(kafka, topic, tmp_path)
    for day in range(1, 4):
        kafka.produce(topic, numbers(10 * day, 2), timestamp=day * 86_400_000)
    run_locally(options)
    assert change(options, "set", "1970-01-03T00:00:00Z", "events").again == [f"{topic}/0 offsets 2 to 5"]
    run_locally(options)
    assert table_ids(tmp_path / "out") == Counter([10, 11, 20, 21, 30, 31, 20, 21, 30, 31])


@pytest.mark.kafka
def test_a_gap_that_stops_a_run_is_passed(kafka: KafkaServer, tmp_path: Path) -> None:
    topic = kafka.new_topic()
    options = kafka_options(kafka, topic, tmp_path)
    kafka.produce(topic, numbers(0, 4))
    run_locally(options)
    kafka.produce(topic, numbers(4, 6))
    kafka.delete_records(topic, 0, 8)
    with pytest.raises(SourceGapError):
        run_locally(options)
    plan = change(options, "set", "beginning", "events")
    assert (plan.again, plan.never) == ([], [])
    run_locally(options)
    assert table_ids(tmp_path / "out") == Counter([0, 1, 2, 3, 8, 9])


# -- delta --------------------------------------------------------------------------------------------


def delta_chain(folder: Path) -> tuple[SampleInput, PipelineOptions, PipelineOptions]:
    sample = SampleInput(folder / "in")
    up = pipeline_options(str(sample.folder), str(folder / "up"), "up")
    down = pipeline_options(
        "",
        str(folder / "down"),
        "down",
        sources=[DeltaSourceOptions("up", str(folder / "up"))],
        sinks=[DeltaSinkOptions("down", str(folder / "down"))],
    )
    return sample, up, down


def version_with(table: Path, name: Path) -> int:
    """Return the version of the table that added the rows of a file, by delta-rs."""
    wanted = set(ids_of(name))
    for version in range(DeltaTable(str(table)).version() + 1):
        held = DeltaTable(str(table), version=version).to_pyarrow_table()
        if "id" in held.schema.names and wanted <= set(held["id"].to_pylist()):
            return version
    raise AssertionError(name)


def test_versions_are_set_and_skipped(tmp_path: Path) -> None:
    sample, up, down = delta_chain(tmp_path)
    make_epochs(sample, up, 3)
    run_to_end(down)
    make_epochs(sample, up, 3, first=4)
    skipped = version_with(tmp_path / "up", sample.path("f004.json"))
    plan = change(down, "skip", str(skipped), "up")
    assert plan.never == [f"version {skipped}"]
    assert change(down, "skip", str(skipped), "up").already
    run_to_end(down)
    expected = sample.ids - ids_of(sample.path("f004.json"))
    assert table_ids(tmp_path / "down") == expected
    back = version_with(tmp_path / "up", sample.path("f005.json"))
    plan = change(down, "set", str(back), "up")
    assert plan.again == [f"version {version_with(tmp_path / 'up', sample.path('f006.json'))}"]
    assert (plan.again_count, plan.unit) == (1, "file")
    run_to_end(down)
    expected += ids_of(sample.path("f006.json"))
    assert table_ids(tmp_path / "down") == expected
    newest = DeltaTable(str(tmp_path / "up")).version()
    for words, message in ((str(newest + 1), "has no version"), ("soon", "no position 'soon'"), ("{}", "no position")):
        with pytest.raises(ConfigError, match=message):
            change(down, "set", words, "up")
    change(down, "set", "beginning", "up")
    run_to_end(down)
    assert table_ids(tmp_path / "down") == expected + sample.ids
    make_epochs(sample, up, 1, first=7)
    change(down, "set", "end", "up")
    run_to_end(down)
    assert table_ids(tmp_path / "down") == expected + sample.ids - ids_of(sample.path("f007.json"))


def test_a_version_that_is_gone_or_undone_is_no_position(tmp_path: Path) -> None:
    sample, up, down = delta_chain(tmp_path)
    make_epochs(sample, up, 4)
    run_to_end(down)
    undone = version_with(tmp_path / "up", sample.path("f004.json"))
    Rollback(open_pipeline(up), 3).perform("person")
    with pytest.raises(ConfigError, match=f"version {undone} was undone"):
        change(down, "set", str(undone), "up")
    change(down, "set", "end", "up")  # the way out of a reader that has read what was undone
    make_epochs(sample, up, 1, first=5)
    run_to_end(down)
    first = version_with(tmp_path / "up", sample.path("f001.json"))
    for version in range(first + 1):
        (tmp_path / "up" / "_delta_log" / f"{version:020d}.json").unlink()
    with pytest.raises(ConfigError, match="no longer in the log"):
        change(down, "set", "0", "up")
