"""The id of an event leads back to the record that it was made from."""

from __future__ import annotations

import json
import random
import sqlite3
from contextlib import closing
from dataclasses import replace
from datetime import timedelta
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from deltalake import write_deltalake

from firnline.errors import ConfigError
from firnline.history.edits.dead_letters import LetterEdit
from firnline.history.trace import EventId, trace
from firnline.options import OutboxOptions
from firnline.run.open_pipeline import open_pipeline
from firnline.sinks.delta.options import DeltaSinkOptions
from firnline.sinks.origins import Origins, find_origin
from firnline.sources.delta.options import DeltaSourceOptions
from firnline.sources.kafka.options import KafkaSourceOptions
from tests.support.kafka import KafkaServer
from tests.support.pipelines import MakeOptions, run_to_end
from tests.support.samples import SampleInput
from tests.support.sqlite_sink import SqliteSinkOptions, register_sqlite


@pytest.fixture(autouse=True)
def kind(monkeypatch: pytest.MonkeyPatch) -> None:
    register_sqlite(monkeypatch)


def test_every_row_is_traced_to_its_line_after_the_outbox_is_swept(
    make_options: MakeOptions, sample: SampleInput, tmp_path: Path
) -> None:
    copy = SqliteSinkOptions("copy", str(tmp_path / "copy.db"), refused=4, on_bad_row="dead_letter")
    table = DeltaSinkOptions("table", str(tmp_path / "table"))
    options = replace(make_options(max_files=2, sinks=(table, copy)), outbox=OutboxOptions(keep=timedelta(0)))
    for number in range(3):
        sample.add(f"f{number}.json", 7, bad=2)
    run_to_end(options)
    corrected = replace(options, sinks=(table, replace(copy, refused=None)))
    LetterEdit(open_pipeline(corrected), "retry").perform("person")
    run_to_end(corrected)
    pipeline, kinds = open_pipeline(corrected), set()
    with closing(sqlite3.connect(tmp_path / "copy.db")) as connection:
        events = connection.execute("SELECT id, record FROM rows").fetchall()
    assert len(events) == sample.ids.total()
    for event, record in events:
        found = trace(pipeline, None, EventId.parse(event))
        (origin,) = found["origins"]
        kinds.add(origin["kind"])
        (origin,) = origin["of"] if origin["kind"] == "dead-letter" else (origin,)
        line = Path(origin["file"]).read_bytes().splitlines()[origin["line"] - 1]
        assert json.loads(line)["id"] == json.loads(record)["id"], found
    assert "dead-letter" in kinds
    with pytest.raises(ConfigError, match="none with number 99"):
        trace(pipeline, None, EventId("demo", 1, "files", 99))
    with pytest.raises(ConfigError, match="is not the id of an event"):
        EventId.parse("demo/1/files")


def test_a_row_of_a_table_is_traced_to_version_and_file(make_options: MakeOptions, tmp_path: Path) -> None:
    upstream = str(tmp_path / "up")
    for number in (1, 2):
        write_deltalake(upstream, pa.table({"id": [number * 10, number * 10 + 1]}), mode="append")
    copy = SqliteSinkOptions("copy", str(tmp_path / "copy.db"))
    options = replace(
        make_options(sinks=(DeltaSinkOptions("table", str(tmp_path / "table")), copy)),
        sources=(DeltaSourceOptions("up", upstream),),
    )
    run_to_end(options)
    write_deltalake(upstream, pa.table({"id": [30, 31]}), mode="append")
    run_to_end(options)
    with closing(sqlite3.connect(tmp_path / "copy.db")) as connection:
        events = connection.execute("SELECT id, record FROM rows").fetchall()
    assert len(events) == 6
    for event, record in events:
        (origin,) = trace(open_pipeline(options), None, EventId.parse(event))["origins"]
        assert origin["kind"] == "delta"
        rows = pq.read_table(origin["file"]).to_pylist()
        assert rows[origin["record"]] == json.loads(record)
        if json.loads(record)["id"] >= 30:
            assert origin["version"] == 2


def test_origins_are_exact_and_small() -> None:
    chance = random.Random(7)
    origins, expected = Origins(), []
    for number in range(20):
        records = sorted(chance.sample(range(10**9, 10**9 + 2000), 1000))
        origins.add(f"input {number % 3}", pa.array(records, pa.int64()))
        expected += [(f"input {number % 3}", record) for record in records]
    stored = origins.to_json()
    assert [find_origin(stored, row) for row in range(0, len(expected), 37)] == expected[::37]
    with pytest.raises(IndexError):
        find_origin(stored, len(expected))
    whole = Origins()
    whole.add("input", pa.array(np.arange(1_000_000)))
    assert len(json.dumps(whole.to_json())) < 200


@pytest.mark.kafka
def test_a_row_of_a_topic_is_traced_to_partition_and_offset(
    make_options: MakeOptions, tmp_path: Path, kafka: KafkaServer
) -> None:
    topic = kafka.new_topic()
    kafka.produce(topic, [json.dumps({"id": number}) for number in range(5)])
    copy = SqliteSinkOptions("copy", str(tmp_path / "copy.db"))
    columns = ("topic", "partition", "offset")
    options = replace(
        make_options(sinks=(DeltaSinkOptions("table", str(tmp_path / "table")), copy)),
        sources=(KafkaSourceOptions("events", brokers=kafka.bootstrap, topics=(topic,), include=columns),),
    )
    run_to_end(options)
    with closing(sqlite3.connect(tmp_path / "copy.db")) as connection:
        events = connection.execute("SELECT id, record FROM rows").fetchall()
    assert len(events) == 5
    for event, record in events:
        (origin,) = trace(open_pipeline(options), None, EventId.parse(event))["origins"]
        row = json.loads(record)
        for name in columns:
            assert origin[name] == next(value for key, value in row.items() if key.endswith(name))
