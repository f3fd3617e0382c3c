"""Followers that are renamed: whatever the kind, nothing is lost, doubled or given to another sink."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest

from firnline.errors import ConfigError
from firnline.options import PipelineOptions
from firnline.run.open_pipeline import open_pipeline
from firnline.sinks.delta.options import DeltaSinkOptions
from firnline.sinks.http.options import HttpSinkOptions
from firnline.sinks.kafka.options import KafkaSinkOptions
from firnline.sinks.postgres.options import PostgresSinkOptions
from firnline.sinks.redis.options import RedisSinkOptions
from tests.support.kafka import KafkaServer
from tests.support.pipelines import MakeOptions, run_once, run_to_end
from tests.support.postgres_sink import TABLE, postgres_ids
from tests.support.receiver import running_receiver
from tests.support.redis import RedisServer
from tests.support.redis_sink import redis_ids
from tests.support.samples import SampleInput
from tests.support.sqlite_sink import DOWN, SqliteSinkOptions, register_sqlite, sqlite_ids


@pytest.fixture(autouse=True)
def kind(monkeypatch: pytest.MonkeyPatch) -> None:
    register_sqlite(monkeypatch)


def rename_and_run(make_options: MakeOptions, sample: SampleInput, folder: Path, copy: object) -> None:
    """Run twice, rename the follower twice, with an epoch after each."""
    delta = DeltaSinkOptions("table", str(folder / "table"))
    for number, name in enumerate(("copy", "copy", "other", "third", "copy")):
        sample.add(f"f{number}.json", 10)
        named = replace(copy, name=name, renamed_from="" if name == "copy" else "copy")  # type: ignore[type-var]
        run_to_end(make_options(max_files=1, sinks=(delta, named)))


@pytest.mark.postgres
def test_a_renamed_postgres_table_goes_on(
    make_options: MakeOptions, sample: SampleInput, tmp_path: Path, postgres: str
) -> None:
    rename_and_run(make_options, sample, tmp_path, PostgresSinkOptions("copy", postgres, TABLE))
    assert postgres_ids(postgres, TABLE) == sample.ids


@pytest.mark.redis
def test_a_renamed_redis_stream_goes_on(
    make_options: MakeOptions, sample: SampleInput, tmp_path: Path, redis_server: RedisServer
) -> None:
    rename_and_run(make_options, sample, tmp_path, RedisSinkOptions("copy", redis_server.url, stream="rows"))
    assert redis_ids(redis_server, "stream") == sample.ids


@pytest.mark.kafka
def test_a_renamed_topic_goes_on(
    make_options: MakeOptions, sample: SampleInput, tmp_path: Path, kafka: KafkaServer
) -> None:
    topic = kafka.new_topic(partitions=1)
    options = KafkaSinkOptions("copy", kafka.bootstrap, topic)
    rename_and_run(lambda **more: make_options(name=topic, **more), sample, tmp_path, options)
    assert len(kafka.read(topic)) == sample.ids.total()


def test_a_renamed_receiver_gets_every_row_once(make_options: MakeOptions, sample: SampleInput, tmp_path: Path) -> None:
    with running_receiver() as receiver:
        rename_and_run(make_options, sample, tmp_path, HttpSinkOptions("copy", receiver.url))
        assert receiver.ids == sample.ids


def halves(tmp_path: Path) -> tuple[SqliteSinkOptions, SqliteSinkOptions]:
    """Two optional followers that get every other row each."""
    return (
        SqliteSinkOptions("even", str(tmp_path / "even.db"), required=False, where="id % 2 = 0"),
        SqliteSinkOptions("odd", str(tmp_path / "odd.db"), required=False, where="id % 2 = 1"),
    )


def lag_of_odd(options: PipelineOptions, sample: SampleInput, tmp_path: Path) -> None:
    """Run one epoch that both followers get, and one that the odd one lacks."""
    sample.add("f1.json", 10)
    run_to_end(options)
    (tmp_path / f"odd.db{DOWN}").touch()
    sample.add("f2.json", 10)
    run_to_end(options)
    (tmp_path / f"odd.db{DOWN}").unlink()


def test_two_followers_that_swap_names_are_refused(make_options: MakeOptions, tmp_path: Path) -> None:
    even, odd = halves(tmp_path)
    swapped = (replace(even, name="odd", renamed_from="even"), replace(odd, name="even", renamed_from="odd"))
    for sinks in (
        swapped,
        (replace(even, name="new", renamed_from="odd"), odd),
        (odd, replace(even, renamed_from="odd")),
    ):
        with pytest.raises(ConfigError, match="means two sinks"):
            open_pipeline(make_options(sinks=(DeltaSinkOptions("table", str(tmp_path / "table")), *sinks)))


def test_a_follower_that_lags_through_two_renames_gets_its_own_rows(
    make_options: MakeOptions, sample: SampleInput, tmp_path: Path
) -> None:
    even, odd = halves(tmp_path)
    delta = DeltaSinkOptions("table", str(tmp_path / "table"))
    options = make_options(max_files=1, sinks=(delta, even, odd))
    lag_of_odd(options, sample, tmp_path)
    (tmp_path / f"odd.db{DOWN}").touch()
    for name in ("second", "third"):
        sample.add(f"{name}.json", 10)
        options = replace(options, sinks=(delta, even, replace(odd, name=name, renamed_from="odd")))
        run_to_end(options)
    (tmp_path / f"odd.db{DOWN}").unlink()
    # The name in between is free again: the new sink of that name gets nothing that waits for the other one.
    new = SqliteSinkOptions("second", str(tmp_path / "new.db"))
    sample.add("f9.json", 10)
    for _ in range(2):
        assert run_once(replace(options, sinks=(*options.sinks, new))).exit_code == 0
    assert sqlite_ids(tmp_path / "odd.db") == Counter(i for i in sample.ids if i % 2)
    assert sqlite_ids(tmp_path / "even.db") == Counter(i for i in sample.ids if i % 2 == 0)
    assert sqlite_ids(tmp_path / "new.db").total() == 10
