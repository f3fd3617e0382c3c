"""Topologies for tests whose channels are Kafka topics: files -> a -> topic -> b."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

from firnline.options import PipelineOptions
from firnline.sinks.delta.options import DeltaSinkOptions
from firnline.sources.kafka.options import KafkaSourceOptions
from tests.support.kafka import KafkaServer
from tests.support.kafka_sinks import kafka_sink
from tests.support.pipelines import pipeline_options, run_to_end
from tests.support.topologies import member


def topic_writer(folder: Path, server: KafkaServer, topic: str, **settings: Any) -> PipelineOptions:
    """Pipeline a: writes the rows of files to a table, which decides, and to a topic."""
    one = member(folder, "a")
    name = f"to-{topic}"  # all tests share a broker
    return replace(one, sinks=(*one.sinks, kafka_sink(server, topic, name, **{"key": ("id",), **settings})))


def topic_reader(
    folder: Path, server: KafkaServer, *topics: str, name: str = "b", brokers: str = "", **settings: object
) -> PipelineOptions:
    """A pipeline that reads topics into a table of its name."""
    source = KafkaSourceOptions("k", brokers or server.bootstrap, topics=topics, group="", poll_interval_secs=0.05)
    return pipeline_options(
        str(folder / "none"),
        str(folder / name),
        name,
        sources=(source,),
        sinks=(DeltaSinkOptions(name, str(folder / name)),),
        **settings,
    )


def run_members(server: KafkaServer, *members: PipelineOptions) -> None:
    """Run each member until its input is exhausted.

    A commit is answered before its rows can be read in every partition: a reader waits for what was written before.
    """
    for one in members:
        for source in one.sources:
            for topic in source.topics if isinstance(source, KafkaSourceOptions) else ():
                server.await_markers(topic)
        run_to_end(one)
