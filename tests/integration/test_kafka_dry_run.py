"""`firnline dry-run` with topics: a sample of the records, and brokers that do not answer."""

from __future__ import annotations

import json
import socket
from pathlib import Path
from typing import Any

import pytest
from confluent_kafka import TopicPartition

from firnline import kafka_client
from firnline.cli.main import run_command
from firnline.clock import monotonic
from firnline.sources.kafka.planning import spread_pieces
from firnline.sources.kafka.position import Range
from tests.support.kafka import KafkaServer
from tests.support.processes import free_port

SPEC = """
name: demo
sources:
  events: {{type: kafka, brokers: "{brokers}", topics: [{topic}]}}
sinks:
  - {{name: lake, type: delta, table: out}}
{more}
batch: {{max_events: {most}}}
"""
SINK = """  - {{name: copy, type: kafka, brokers: "{brokers}", topic: {topic}}}"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def write_spec(folder: Path, brokers: str, topic: str, *, most: int = 10_000, more: str = "") -> None:
    (folder / "firnline.yml").write_text(SPEC.format(brokers=brokers, topic=topic, most=most, more=more))


@pytest.mark.kafka
def test_a_topic_is_sampled_over_its_partitions_without_a_group(
    kafka: KafkaServer, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    topic = kafka.new_topic(2)
    for number in range(2):
        values = [json.dumps({"id": n, "price": n / 2, "part": f"p{number}"}) for n in range(3_000)]
        kafka.produce(topic, values, partition=number)
    kafka.produce(topic, ['{"id": 1, "part": "open"}'], partition=0, transactional_id=f"x-{topic}", abort=True)
    kafka.produce(topic, ["no json", '{"id": "odd"}', '{"id": 7, "late": true}'], partition=1)
    write_spec(folder, kafka.bootstrap, topic, most=4_000)
    assert run_command(["dry-run", "--json"]) == 0
    found: Any = json.loads(capsys.readouterr().out)
    assert {column["name"]: column["type"] for column in found["schema"]} == {
        "id": "int64", "price": "float64", "part": "string",
    }  # fmt: skip
    sample = found["sample"]
    assert (sample["files"], sample["of_files"], sample["records"], sample["bad"]) == (2, 2, 6_003, 1)
    assert sample["rescued"] == 1
    assert any("later" in warning and "late" in warning for warning in found["warnings"])
    assert found["first_epoch"]["files"] == 2
    assert found["first_epoch"]["size_bytes"] > 4_000 * 20
    assert not (folder / "out").exists()
    group = kafka.consumer(group_id="firnline-demo")
    assert [one.offset for one in group.committed([TopicPartition(topic, n) for n in range(2)], 30)] == [-1001] * 2
    group.close()
    assert run_command(["dry-run"]) == 0
    assert "2 partitions" in capsys.readouterr().out


def test_pieces_are_spread_over_ranges() -> None:
    assert spread_pieces([Range(5, 8, 3)], 50, 1_000) == [(0, Range(5, 8, 3))]
    pieces = spread_pieces([Range(0, 1_000_000, 1), Range(10, 30, 2)], 50, 1_000)
    assert len(pieces) == 26
    assert (pieces[0], pieces[24], pieces[25]) == (
        (0, Range(0, 1_000, 1)),
        (0, Range(999_000, 1_000_000, -1)),
        (1, Range(10, 30, 2)),
    )


@pytest.mark.parametrize("which", ["source", "sink"])
@pytest.mark.parametrize("how", ["refuses", "silent"])
def test_brokers_that_do_not_answer_end_a_dry_run_soon_and_are_named(
    folder: Path, which: str, how: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    if how == "silent":
        monkeypatch.setattr(kafka_client, "ANSWER_SECONDS", 2.0)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        brokers = f"127.0.0.1:{free_port() if how == 'refuses' else silent.getsockname()[1]}"
        if which == "source":
            write_spec(folder, brokers, "t")
        else:
            (folder / "in").mkdir()
            spec = "name: demo\nsources:\n  files: {type: files, path: in}\nsinks:\n"
            spec += "  - {name: lake, type: delta, table: out}\n" + SINK.format(brokers=brokers, topic="t")
            (folder / "firnline.yml").write_text(spec)
        began = monotonic()
        code = run_command(["dry-run"])
        took = monotonic() - began
    shown = capsys.readouterr().err
    assert (code, brokers in shown) == (3, True), shown
    assert ("Connection refused" in shown) == (how == "refuses"), shown
    assert took < 50  # less than a client waits that nobody told how long, and enough for a busy machine
