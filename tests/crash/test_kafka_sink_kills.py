"""A run that dies, sleeps or is not alone while it writes to Kafka: a reader finds every row once, in order."""

from __future__ import annotations

import json
import signal
from collections import Counter
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from firnline.history.edits.rollback import Rollback
from firnline.options import PipelineOptions
from firnline.run.open_pipeline import open_pipeline
from tests.support.kafka import KafkaServer
from tests.support.kafka_sinks import kafka_sink, table_and_topic, topic_ids
from tests.support.kills import in_proof, kill_at_every_point
from tests.support.pipelines import MakeOptions, run_once
from tests.support.processes import KILLED, Launcher
from tests.support.samples import SampleInput, table_ids

pytestmark = [pytest.mark.crash, pytest.mark.kafka]

POINTS = ("kafka.create.", "kafka.claim.", "kafka.join.", "kafka.commit.", "follower.commit.", "letter.put.")
FENCED = 5


def run(options: PipelineOptions) -> None:
    """Run until the input is exhausted, in a child."""
    assert run_once(options).exit_code == 0


@pytest.mark.parametrize(
    "settings",
    [
        pytest.param({"max_transaction_bytes": 4000}, id="ranges"),
        pytest.param({"lanes": 3}, id="lanes"),
        pytest.param({"on_bad_row": "dead_letter"}, id="dead letters"),
    ],
)
def test_killed_at_every_point(
    settings: dict[str, Any], sample: SampleInput, make_options: MakeOptions, tmp_path: Path, kafka: KafkaServer
) -> None:
    refused = Counter[int]()
    for number in range(2):
        sample.add(f"{number}.json", 60)
    if "on_bad_row" in settings:
        before = set(sample.ids)
        sample.add("2.json", 1, text="x" * 5000)
        refused = Counter(set(sample.ids) - before)
    worlds = iter(range(1000))

    def prepare() -> PipelineOptions:
        folder = tmp_path / str(next(worlds))
        topic = kafka.new_topic(2, max_message_bytes=4000)
        return make_options(max_files=1, sinks=table_and_topic(folder, kafka_sink(kafka, topic, **settings)))

    def check(options: PipelineOptions, where: str) -> None:
        assert run_once(options).exit_code == 0, where
        table, sink = options.sinks
        assert table_ids(Path(table.location)) == sample.ids, where
        assert topic_ids(kafka, sink.topic) == sample.ids - refused, where  # type: ignore[attr-defined]

    points = [f"{name}{side}" for name in POINTS for side in ("before", "after")]
    reached = kill_at_every_point(prepare, partial(run), check, points=points, most=in_proof(2))
    wanted = {"kafka.create.after", "kafka.claim.after", "kafka.commit.after", "follower.commit.after"}
    wanted |= {"letter.put.after"} if refused else set()
    assert wanted <= reached.keys()


@pytest.mark.parametrize("lanes", [1, 2])
@pytest.mark.parametrize("point", ["kafka.commit.before", "kafka.commit.after", "kafka.claim.before"])
def test_a_run_that_sleeps_while_another_takes_over_writes_nothing_more(
    point: str, lanes: int, launcher: Launcher, sample: SampleInput, make_options: MakeOptions, tmp_path: Path,
    kafka: KafkaServer,
) -> None:  # fmt: skip
    """It wakes in mid-transaction; its producer is fenced, and the newer generation in the checkpoint ends it."""
    topic = kafka.new_topic(2)
    options = make_options(max_files=1, sinks=table_and_topic(tmp_path, kafka_sink(kafka, topic, lanes=lanes)))
    for number in range(3):
        sample.add(f"{number}.json", 20)
    # A claim is a commit, too: the third one with one lane, or the fourth with two, has rows.
    nth = 1 if "claim" in point else lanes + 2
    sleeper = launcher.start(options, f"{point}:{nth}:stop")
    sleeper.wait_until_stopped()
    ended = launcher.start(options).wait(180)
    assert ended.exit_code == 0, ended
    assert topic_ids(kafka, topic) == sample.ids
    sleeper.signal(signal.SIGCONT)
    assert sleeper.wait(180).exit_code == FENCED
    assert topic_ids(kafka, topic) == table_ids(tmp_path / "table") == sample.ids
    sample.add("9.json", 5)
    assert launcher.start(options).wait(180).exit_code == 0
    assert topic_ids(kafka, topic) == table_ids(tmp_path / "table") == sample.ids


def test_killed_again_and_again_with_other_settings_each_time(
    launcher: Launcher, sample: SampleInput, make_options: MakeOptions, tmp_path: Path, kafka: KafkaServer
) -> None:
    """Lanes 3, 1, 2 and sizes of transactions change between tries of the same epoch."""
    topic, kills = kafka.new_topic(2), 0
    sink = kafka_sink(kafka, topic)
    faults = ["kafka.commit.before:5", "kafka.commit.after:3", "kafka.commit.before:4", "kafka.join.after:1", ""]
    settings: list[dict[str, Any]] = [
        {"lanes": 3, "max_transaction_bytes": 3000},
        {"lanes": 1, "max_transaction_bytes": 1500},
        {"lanes": 2},
        {"lanes": 3},
        {"lanes": 2, "max_transaction_bytes": 2000},
    ]
    for number, (fault, chosen) in enumerate(zip(faults, settings, strict=True)):
        sample.add(f"{number}.json", 40)
        edited = kafka_sink(kafka, topic, sink.name, **chosen)
        options = make_options(max_files=1, sinks=table_and_topic(tmp_path, edited))
        ended = launcher.start(options, f"{fault}:kill" if fault else "", threads=2).wait(180)
        assert ended.exit_code in (KILLED, 0), ended
        kills += ended.exit_code == KILLED
    assert launcher.start(options).wait(180).exit_code == 0
    assert topic_ids(kafka, topic) == table_ids(tmp_path / "table") == sample.ids
    assert kills >= 3


def test_a_rollback_behind_a_part_of_an_epoch_says_so_in_every_partition(
    launcher: Launcher, sample: SampleInput, make_options: MakeOptions, tmp_path: Path, kafka: KafkaServer
) -> None:
    """The run is killed after the first transaction of epoch 2: the topic has a part of it, and its head is epoch 1."""
    topic = kafka.new_topic(2)
    sink = kafka_sink(kafka, topic, max_transaction_bytes=3000)
    options = make_options(max_files=1, sinks=table_and_topic(tmp_path, sink))
    sample.add("1.json", 10)
    run(options)
    whole = Counter(sample.ids)
    sample.add("2.json", 60)
    ended = launcher.run(options, "kafka.commit.after:2:kill")  # the first commit is the claim
    assert ended.exit_code == KILLED
    assert whole < topic_ids(kafka, topic) < sample.ids
    Rollback(open_pipeline(options), 1, leave=[sink.name]).perform("person")
    run(options)
    records = kafka.read(topic)
    controls = [record for record in records if record.key == b"firnline-control"]
    assert [record.partition for record in controls] == [0, 1]
    assert {json.dumps(json.loads(one.value or b"")["undone"]) for one in controls} == {'{"first": 2, "last": 2}'}
    kept = [
        json.loads(record.value or b"")["id"]
        for record in records
        if record.key != b"firnline-control" and int(record.headers["firnline-epoch"]) != 2
    ]
    assert Counter(kept) == table_ids(tmp_path / "table") == sample.ids


def test_two_runs_at_once(
    launcher: Launcher, sample: SampleInput, make_options: MakeOptions, tmp_path: Path, kafka: KafkaServer
) -> None:
    """Both begin, one fences the other; whoever is left, or comes next, finishes."""
    topic = kafka.new_topic(2)
    options = make_options(max_files=1, sinks=table_and_topic(tmp_path, kafka_sink(kafka, topic, lanes=2)))
    for number in range(4):
        sample.add(f"{number}.json", 20)
    for _ in range(2):
        both = [launcher.start(options), launcher.start(options)]
        assert {child.wait(180).exit_code for child in both} <= {0, FENCED, 6}
        sample.add(f"more-{len(sample.ids)}.json", 20)
    assert launcher.start(options).wait(180).exit_code == 0
    assert topic_ids(kafka, topic) == table_ids(tmp_path / "table") == sample.ids
