"""The graph of a topology, derived from the options of its pipelines."""

from __future__ import annotations

import pytest

from firnline.cli.topology import draw
from firnline.errors import ConfigError
from firnline.history.topology.graph import make_topology
from firnline.options import Home, PipelineOptions, SinkOptions, SourceOptions
from firnline.sinks.delta.options import DeltaPartsOptions, DeltaSinkOptions, journal_in
from firnline.sinks.kafka.options import KafkaSinkOptions
from firnline.sources.delta.options import DeltaSourceOptions
from firnline.sources.files.options import FileSourceOptions
from firnline.sources.kafka.options import KafkaSourceOptions


def reads(table: str, name: str = "") -> DeltaSourceOptions:
    return DeltaSourceOptions(name or table, f"/lake/{table}")


def writes(table: str) -> DeltaSinkOptions:
    return DeltaSinkOptions(table, f"/lake/{table}/")


def pipeline(name: str, sources: list[SourceOptions], sinks: list[SinkOptions]) -> PipelineOptions:
    return PipelineOptions(
        name, tuple(sources) or (FileSourceOptions("in", "/in"),), tuple(sinks), journal=journal_in(Home(f"/h/{name}"))
    )


def test_a_diamond() -> None:
    found = make_topology(
        [
            pipeline("join", [reads("left"), reads("right")], [writes("end")]),
            pipeline("right", [reads("start")], [writes("right")]),
            pipeline("left", [reads("start")], [writes("left")]),
            pipeline("start", [], [writes("start")]),
        ]
    )
    ends = {(channel.writer, channel.reader, channel.place) for channel in found.channels}
    assert ends == {
        ("start", "left", "/lake/start"),
        ("start", "right", "/lake/start"),
        ("left", "join", "/lake/left"),
        ("right", "join", "/lake/right"),
    }
    assert (found.cycles, found.conflicts, found.outside) == ((), (), [])
    assert list(draw(found)) == ["start", "|-> left", "|   `-> join", "`-> right", "    `-> join"]


def test_cycles_are_named() -> None:
    found = make_topology(
        [
            pipeline("a", [reads("b")], [writes("a")]),
            pipeline("b", [reads("a")], [writes("b")]),
            pipeline("self", [reads("self")], [writes("self")]),
            pipeline("alone", [], [writes("alone")]),
        ]
    )
    assert found.cycles == (("a", "b"), ("self",))
    assert found.outside == ["alone"]
    assert list(draw(found)) == ["alone", "a", "`-> b", "    `-> a (above)", "self", "`-> self (above)"]


def test_several_writers_are_no_channel() -> None:
    found = make_topology(
        [
            pipeline("one", [], [writes("t")]),
            pipeline("two", [], [writes("t")]),
            pipeline("reader", [reads("t")], [writes("u")]),
        ]
    )
    assert found.channels == ()
    assert str(found.conflicts[0]) == "/lake/t is written by 'one' (sink 't') and 'two' (sink 't')"


def test_a_table_that_two_write_and_nobody_reads_is_no_conflict() -> None:
    found = make_topology([pipeline("one", [], [writes("t")]), pipeline("two", [], [writes("t")])])
    assert found.conflicts == ()


def test_topics_of_the_same_cluster() -> None:
    writer = pipeline("writer", [], [KafkaSinkOptions("events", "one:9092,two:9092", "events")])
    near = pipeline("near", [KafkaSourceOptions("in", "two:9092", topics=("events", "more"))], [writes("t")])
    far = pipeline("far", [KafkaSourceOptions("in", "three:9092", topics=("events",))], [writes("u")])
    by_pattern = pipeline("by_pattern", [KafkaSourceOptions("in", "one:9092", pattern="ev.*")], [writes("v")])
    found = make_topology([writer, near, far, by_pattern])
    assert {(c.reader, c.kind, c.place) for c in found.channels} == {
        ("near", "kafka", "events"),
        ("by_pattern", "kafka", "events"),
    }


def test_topics_and_tables_of_templates() -> None:
    writer = pipeline(
        "writer",
        [],
        [
            KafkaSinkOptions("events", "one:9092", "events.{region}"),
            DeltaPartsOptions("parts", "/lake/parts/{region}"),
        ],
    )
    reader = pipeline(
        "reader",
        [
            KafkaSourceOptions("in", "one:9092", topics=("events.eu", "other")),
            reads("parts/eu"),
            reads("parts/eu/deeper"),
        ],
        [writes("t")],
    )
    found = make_topology([writer, reader]).channels
    assert {(channel.place, channel.part) for channel in found} == {("events.eu", False), ("/lake/parts/eu", True)}


def test_two_pipelines_of_one_name_are_refused() -> None:
    with pytest.raises(ConfigError, match="the name 'a'"):
        make_topology([pipeline("a", [], [writes("a")]), pipeline("a", [], [writes("b")])])


def test_a_template_that_may_render_the_topic_of_another_writer_is_a_conflict() -> None:
    plain = pipeline("plain", [], [KafkaSinkOptions("eu", "one:9092", "orders.eu")])
    rendered = KafkaSinkOptions("all", "one:9092", "orders.{region}", topics_allowed=r"orders\.[a-z]+")
    by_pattern = pipeline("reader", [KafkaSourceOptions("in", "one:9092", pattern=r"orders\..*")], [writes("t")])
    found = make_topology([plain, pipeline("rendered", [], [rendered]), by_pattern])
    assert found.channels == ()
    assert list(map(str, found.conflicts)) == [
        "orders.eu is written by 'plain' (sink 'eu') and 'rendered' (sink 'all')"
    ]
    other = KafkaSinkOptions("all", "one:9092", "orders.{region}", topics_allowed=r"orders\.(us|asia)")
    found = make_topology([plain, pipeline("rendered", [], [other]), by_pattern])
    assert found.conflicts == ()
    assert {channel.place for channel in found.channels} == {"orders.eu", "orders.{region}"}


def test_two_templates_for_the_same_names_are_a_conflict() -> None:
    def writer(name: str, topic: str, allowed: str = r"o\..*") -> PipelineOptions:
        return pipeline(name, [], [KafkaSinkOptions("k", "one:9092", topic, topics_allowed=allowed)])

    reader = pipeline("reader", [KafkaSourceOptions("in", "one:9092", pattern=r"o\..*")], [writes("t")])
    assert len(make_topology([writer("a", "o.{x}"), writer("b", "o.{y}"), reader]).conflicts) == 1
    assert len(make_topology([writer("a", "o.{x}"), writer("b", "o.eu.{y}"), reader]).conflicts) == 1
    assert make_topology([writer("a", "o.eu.{x}"), writer("b", "o.us.{y}"), reader]).conflicts == ()


def test_a_topic_that_topics_allowed_forbids_is_no_channel() -> None:
    sink = KafkaSinkOptions("all", "one:9092", "orders.{region}", topics_allowed=r"orders\.(eu|us)")
    source = KafkaSourceOptions("in", "one:9092", topics=("orders.eu", "orders.legacy"))
    found = make_topology([pipeline("writer", [], [sink]), pipeline("reader", [source], [writes("t")])])
    assert [channel.place for channel in found.channels] == ["orders.eu"]


def test_topics_of_one_name_in_two_clusters_are_two_channels() -> None:
    members = []
    for cluster in ("one", "two"):
        source = KafkaSourceOptions("in", f"{cluster}:9092", topics=("events",))
        members.append(pipeline(f"writer {cluster}", [], [KafkaSinkOptions("k", f"{cluster}:9092", "events")]))
        members.append(pipeline(f"reader {cluster}", [source], [writes(cluster)]))
    found = make_topology(members)
    assert found.conflicts == ()
    assert {(c.writer, c.reader) for c in found.channels} == {
        ("writer one", "reader one"),
        ("writer two", "reader two"),
    }
