"""The graph of a pipeline: orders, circles, who reads what."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from firnline.errors import ConfigError
from firnline.graph import (
    Node,
    default_inputs,
    downstream,
    find_cycle,
    find_source,
    graph_of,
    resolve_port,
    sink_input,
    sort_operators,
    split_port,
    stateful,
    topological,
    upstream,
)
from firnline.options import OperatorOptions, PipelineOptions
from firnline.sinks.delta.options import DeltaSinkOptions
from firnline.sources.files.options import FileSourceOptions

NAMES = [f"o{number}" for number in range(8)]


def consumers(options: PipelineOptions, name: str) -> list[Node]:
    """The operators and sinks that read a source, an operator's main output or (`totals.late`) a port."""
    graph = graph_of(options)
    wanted = resolve_port(name, [n.name for n in graph.nodes if n.kind != "sink"])
    return [e.target for e in graph.edges if (e.source.name, e.port) == wanted]


def pipeline(
    operators: dict[str, tuple[str, ...]], *sinks: str, sources: tuple[str, ...] = ("s",), sql: tuple[str, ...] = ()
) -> PipelineOptions:
    return PipelineOptions(
        name="p",
        sources=tuple(FileSourceOptions(name, f"/data/{name}") for name in sources),
        operators=tuple(OperatorOptions(n, "sql" if n in sql else "aggregate", i) for n, i in operators.items()),
        sinks=tuple(DeltaSinkOptions(f"delta-{n}", f"/out/{n}", input=text) for n, text in enumerate(sinks, 1)),
    )


DIAMOND = pipeline(
    {"join": ("left", "right.late"), "left": ("s",), "right": ("s", "my.source")},
    "join",
    "right",
    sources=("s", "my.source"),
    sql=("join",),
)


def test_the_longest_known_name_is_the_node_and_the_rest_its_port() -> None:
    names = ["shop", "shop.old", "a"]
    assert resolve_port("shop", names) == ("shop", "")
    assert resolve_port("shop.public.orders", names) == ("shop", "public.orders")
    assert resolve_port("shop.old.orders", names) == ("shop.old", "orders")
    assert resolve_port("other.x", names) == ("other", "x")
    options = pipeline({"a": ("s.orders",)}, "a", "s.users")
    assert [find_source(options, text) for text in ("s.orders", "s", "a")] == [
        (options.sources[0], "orders"),
        (options.sources[0], ""),
        None,
    ]
    assert [node.name for node in downstream(options, "s")] == ["a", "delta-1", "delta-2"]
    assert [(edge.source.name, edge.port) for edge in graph_of(options).edges] == [
        ("s", "orders"),
        ("a", ""),
        ("s", "users"),
    ]


@pytest.mark.parametrize(
    ("text", "parts"), [("totals", ("totals", "")), ("totals.late", ("totals", "late")), ("a.b.c", ("a.b", "c"))]
)
def test_a_port_follows_the_last_dot(text: str, parts: tuple[str, str]) -> None:
    assert split_port(text) == parts


def test_operators_come_after_what_they_read() -> None:
    assert [o.name for o in topological(DIAMOND)] == ["left", "right", "join"]
    assert [o.name for o in stateful(DIAMOND)] == ["left", "right"]


def test_the_order_of_the_spec_is_kept_where_it_can_be() -> None:
    options = pipeline({"c": ("s",), "a": ("s",), "b": ("c",)}, "b", "a")
    assert [o.name for o in topological(options)] == ["c", "a", "b"]


def test_consumers_are_those_of_one_port() -> None:
    assert [(n.kind, n.name) for n in consumers(DIAMOND, "right")] == [("sink", "delta-2")]
    assert [(n.kind, n.name) for n in consumers(DIAMOND, "right.late")] == [("operator", "join")]
    assert [(n.kind, n.name) for n in consumers(DIAMOND, "my.source")] == [("operator", "right")]
    assert [n.name for n in consumers(DIAMOND, "s")] == ["left", "right"]


def test_downstream_and_upstream_reach_over_all_ports() -> None:
    assert [n.name for n in downstream(DIAMOND, "left")] == ["join", "delta-1"]
    assert [n.name for n in downstream(DIAMOND, "my.source")] == ["join", "right", "delta-1", "delta-2"]
    assert [n.name for n in upstream(DIAMOND, "join")] == ["s", "my.source", "left", "right"]
    assert [n.name for n in upstream(DIAMOND, "right.late")] == ["s", "my.source"]
    assert upstream(DIAMOND, "s") == []


def test_the_graph_has_every_node_and_edge() -> None:
    graph = graph_of(DIAMOND)
    assert [n.name for n in graph.nodes] == ["s", "my.source", "join", "left", "right", "delta-1", "delta-2"]
    assert [(e.source.name, e.port, e.target.name) for e in graph.edges] == [
        ("left", "", "join"),
        ("right", "late", "join"),
        ("s", "", "left"),
        ("s", "", "right"),
        ("my.source", "", "right"),
        ("join", "", "delta-1"),
        ("right", "", "delta-2"),
    ]


def test_a_source_and_a_sink_may_share_a_name() -> None:
    options = PipelineOptions("p", (FileSourceOptions("x", "/in"),), (DeltaSinkOptions("x", "/out"),))
    assert [(n.kind, n.name) for n in consumers(options, "x")] == [("sink", "x")]
    assert [(n.kind, n.name) for n in downstream(options, "x")] == [("sink", "x")]


@pytest.mark.parametrize(
    ("sources", "reads", "found"),
    [
        (["s"], {}, ["s"]),
        (["s", "t"], {}, ["s", "t"]),
        (["s"], {"a": ["s"], "b": ["a"]}, ["b"]),
        (["s"], {"a": ["s"], "b": ["a.late"]}, ["b"]),
        (["s"], {"a": ["s"], "b": ["s"]}, ["a", "b"]),
    ],
)
def test_a_sink_reads_what_nothing_else_does(sources: list[str], reads: dict[str, list[str]], found: list[str]) -> None:
    assert default_inputs(sources, reads) == found


def test_a_sink_without_input_reads_the_only_candidate() -> None:
    options = pipeline({"a": ("s",)}, "")
    assert sink_input(options, options.sinks[0]) == "a"
    assert [n.name for n in consumers(options, "a")] == ["delta-1"]


def test_several_candidates_are_named() -> None:
    options = pipeline({"a": ("s",), "b": ("s",)}, "")
    with pytest.raises(ConfigError, match=r'^sink "delta-1" needs an input: one of a, b$'):
        graph_of(options)


def test_an_input_that_names_nothing_is_an_error() -> None:
    with pytest.raises(ConfigError, match=r'^operator "a" reads "x", which is no source and no operator$'):
        graph_of(pipeline({"a": ("x",)}, "a"))


def test_a_circle_is_named_in_the_direction_of_the_rows() -> None:
    options = pipeline({"a": ("s", "c"), "b": ("a",), "c": ("b.late",)}, "c")
    with pytest.raises(ConfigError, match=r"^operators read each other in a circle: a -> b -> c -> a$"):
        topological(options)


def test_an_operator_that_reads_itself_is_a_circle() -> None:
    assert find_cycle({"a": ["a"]}) == ["a", "a"]


@st.composite
def acyclic(draw: st.DrawFn) -> dict[str, list[str]]:
    """Operators that read only ones before them in a hidden order."""
    hidden = draw(st.permutations(NAMES))
    reads = {n: draw(st.lists(st.sampled_from(hidden[:at] or [n]), unique=True)) for at, n in enumerate(hidden)}
    reads[hidden[0]] = []
    return {name: reads[name] for name in draw(st.permutations(NAMES))}


@given(acyclic())
def test_any_graph_without_a_circle_is_sorted(reads: dict[str, list[str]]) -> None:
    order = sort_operators(reads)
    assert sorted(order) == sorted(reads)
    assert all(order.index(read) < order.index(name) for name in reads for read in reads[name])
    assert find_cycle(reads) is None


@given(acyclic(), st.lists(st.sampled_from(NAMES), min_size=1, unique=True))
def test_any_circle_is_found_and_is_one(reads: dict[str, list[str]], circle: list[str]) -> None:
    for at, name in enumerate(circle):
        reads[name] = [*reads[name], circle[at - 1]]
    found = find_cycle(reads)
    assert found is not None
    assert found[0] == found[-1]
    assert len(set(found)) == len(found) - 1 > 0
    assert all(before in reads[after] for before, after in pairwise(found))


@given(st.dictionaries(st.sampled_from(NAMES), st.lists(st.sampled_from(NAMES), unique=True)))
def test_a_circle_is_found_exactly_when_something_cannot_be_sorted(reads: dict[str, list[str]]) -> None:
    closed = {name: [read for read in inputs if read in reads] for name, inputs in reads.items()}
    assert (find_cycle(closed) is None) == (len(sort_operators(closed)) == len(closed))
