"""Quarantined records of topics that are read again (`quarantine --replay`): by their stored bytes, exactly once."""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any

import pytest
from deltalake import DeltaTable

from firnline.cli.main import run_command
from firnline.history.edits.rollback import Rollback
from firnline.history.quarantine import load_quarantine, load_quarantine_files
from firnline.options import BatchOptions, PipelineOptions
from firnline.run.open_pipeline import open_pipeline
from firnline.sinks.delta.options import DeltaSinkOptions
from firnline.sources.kafka.options import KafkaSourceOptions
from firnline.testing.local import run_locally
from tests.support.kafka import KafkaServer
from tests.support.registry import running_registry

pytestmark = pytest.mark.kafka
BY_V: dict[str, Any] = {"write": "upsert", "key": ("v",)}


def options_of(kafka: KafkaServer, topic: str, table: Path, *, sink: Any = None, **settings: Any) -> PipelineOptions:
    given = {"include": ("topic", "partition", "offset"), "lineage": True, "max_bad_ratio": 1.0, **settings}
    source = KafkaSourceOptions("events", brokers=kafka.bootstrap, topics=(topic,), **given)
    batch = BatchOptions(max_events=100_000, max_bytes=64 << 20, max_ms=200)
    return PipelineOptions("p", (source,), (DeltaSinkOptions("out", str(table), **(sink or {})),), batch=batch)


def run(options: PipelineOptions) -> None:
    assert run_locally(options).exit_code == 0


def ask(options: PipelineOptions, *, discard: bool = False) -> None:
    pipeline = open_pipeline(options)
    files = [file.describe([number for number, _ in file.rows]) for file in load_quarantine_files(pipeline)]
    pipeline.requests.ask_replay("events", files, discard=discard, ids=pipeline.ids)


def bad(options: PipelineOptions) -> list[tuple[str, int, str]]:
    return sorted((row["file"], row["record"], row["reason"]) for row in load_quarantine(open_pipeline(options)))


def rows(table: Path, *columns: str) -> list[tuple[Any, ...]]:
    found = DeltaTable(str(table)).to_pyarrow_table().to_pylist()
    return sorted((tuple(row.get(name) for name in columns) for row in found), key=repr)


def fill(kafka: KafkaServer, table: Path) -> tuple[str, PipelineOptions]:
    """Two records lack `v`, the key in the first spec; one is no JSON under any spec. Returns the options of today."""
    topic = kafka.new_topic(2)
    kafka.produce(topic, ['{"id": 1, "v": "x"}', '{"id": 2}', "broken"], partition=0)
    kafka.produce(topic, ['{"id": 3}'], partition=1)
    run(options_of(kafka, topic, table, sink=BY_V))
    today = options_of(kafka, topic, table)
    assert bad(today) == [
        (f"{topic}/0", 1, "missing-required"),
        (f"{topic}/0", 2, "not-json"),
        (f"{topic}/1", 0, "missing-required"),
    ]
    return topic, today


def test_records_are_decoded_by_the_settings_of_today_exactly_once(kafka: KafkaServer, tmp_path: Path) -> None:
    table = tmp_path / "t"
    topic, today = fill(kafka, table)
    before = open_pipeline(today).load().epoch
    kafka.delete_records(topic, 0, 3)  # the stored bytes are enough
    ask(today)
    kafka.produce(topic, ['{"id": 4, "v": "y"}'], partition=0)
    run(today)
    run(today)
    wanted = [(1, f"{topic}/0", 0), (2, f"{topic}/0", 1), (3, f"{topic}/1", 0), (4, f"{topic}/0", 3)]
    assert rows(table, "id", "_firnline_file", "_firnline_record") == wanted
    assert rows(table, "_topic", "_partition", "_offset") == [
        (topic, 0, 0), (topic, 0, 1), (topic, 0, 3), (topic, 1, 0)
    ]  # fmt: skip
    assert bad(today) == [(f"{topic}/0", 2, "not-json")]
    assert open_pipeline(today).requests.load() == []
    Rollback(open_pipeline(today), before + 1).perform("test")  # the epoch after the one that read them again
    assert rows(table, "id") == [(1,), (2,), (3,)]
    Rollback(open_pipeline(today), before).perform("test")
    assert [one[1:] for one in bad(today)] == [(1, "missing-required"), (2, "not-json"), (0, "missing-required")]
    ask(today)
    run(today)
    assert rows(table, "id") == [(1,), (2,), (3,), (4,)]


def test_the_command_asks_and_drops(
    kafka: KafkaServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    topic = kafka.new_topic()
    kafka.produce(topic, ['{"id": 1}', "broken", "worse"])

    def write_spec(include: str) -> None:
        source = f"{{type: kafka, brokers: '{kafka.bootstrap}', topics: [{topic}], include: [{include}]}}"
        (tmp_path / "firnline.yml").write_text(
            f"name: p\nsources:\n  events: {source}\nsinks:\n  - {{name: out, type: delta, table: t}}\n"
        )

    write_spec("offset")
    options = options_of(kafka, topic, tmp_path / "t", include=("offset",), lineage=False)
    run(options)
    write_spec("offset, key")
    assert run_command(["quarantine", "--replay", "--yes", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["records"], list(found["left_out"].values())) == (0, [2])
    write_spec("offset")
    assert run_command(["quarantine", "--replay", "--yes", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["records"] == 2
    run(options)
    assert bad(options) == [(f"{topic}/0", 1, "not-json"), (f"{topic}/0", 2, "not-json")]
    assert run_command(["quarantine", "--drop", "--yes", "--json"]) == 0
    run(options)
    assert bad(options) == []
    assert rows(tmp_path / "t", "id") == [(1,)]


def test_records_stay_in_quarantine_if_a_fact_about_them_is_wanted_that_it_does_not_hold(
    kafka: KafkaServer, tmp_path: Path
) -> None:
    topic, today = fill(kafka, tmp_path / "t")
    ask(today)
    run(options_of(kafka, topic, tmp_path / "t", include=("offset", "key")))
    assert len(bad(today)) == 3
    assert open_pipeline(today).requests.load() == []


def test_a_schema_that_is_registered_later(kafka: KafkaServer, tmp_path: Path) -> None:
    topic = kafka.new_topic()
    kafka.produce(topic, [struct.pack(">bI", 0, 1) + b"\x0e"])
    with running_registry() as registry:
        options = options_of(kafka, topic, tmp_path / "t", value="avro", registry={"url": registry.url})
        run(options)
        assert bad(options) == [(f"{topic}/0", 0, "unknown-schema")]
        registry.add({"type": "record", "name": "R", "fields": [{"name": "id", "type": "long"}]})
        ask(options)
        run(options)
    assert rows(tmp_path / "t", "id", "_offset") == [(7, 0)]
    assert bad(options) == []


def test_the_ledger_tells_what_was_read_again(kafka: KafkaServer, tmp_path: Path) -> None:
    """A lost checkpoint follows from it, and so does another reading of that epoch for the state of operators."""
    _, today = fill(kafka, tmp_path / "t")
    then = open_pipeline(today).load().checkpoint
    ask(today)
    [request] = open_pipeline(today).requests.load()
    run(today)
    pipeline = open_pipeline(today)
    newest = pipeline.load().entry
    assert then is not None
    assert newest is not None
    source, records = pipeline.sources["events"], pipeline.ledger.load(newest).inputs["events"]
    assert source.answered(source.replay(then.positions["events"], records)) == {request.id}
    again = source.replan(then.positions["events"], records, 2)
    assert sum(int(item["to"]) for split in again.splits for item in split.inputs if "quarantine" in item) == 3
    assert source.find_unavailable(then.positions["events"], records) == []
