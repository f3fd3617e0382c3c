"""The graph of a pipeline: which source, operator and sink reads which."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from firnline.errors import ConfigError
from firnline.options import OperatorOptions, PipelineOptions, SinkOptions, SourceOptions

Kind = Literal["source", "operator", "sink"]


@dataclass(frozen=True, slots=True)
class Node:
    """A source, an operator or a sink, and its inputs: names, or ports like `totals.late`."""

    kind: Kind
    name: str
    type: str
    inputs: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Edge:
    """A connection from a port of one node to another node. A source and a sink may share a name."""

    source: Node
    port: str  # empty: the main port
    target: Node


@dataclass(frozen=True, slots=True)
class Graph:
    """Sources, operators and sinks, each in the order of the spec, and the edges between them."""

    nodes: tuple[Node, ...]
    edges: tuple[Edge, ...]


def graph_of(options: PipelineOptions) -> Graph:
    """Return the graph of a pipeline.

    Raises:
        ConfigError: an input names nothing.
    """
    givers = {
        **{s.name: Node("source", s.name, s.type) for s in options.sources},
        **{o.name: Node("operator", o.name, o.type, o.inputs) for o in options.operators},
    }
    sinks = [Node("sink", s.name, s.type, (sink_input(options, s),)) for s in options.sinks]
    nodes = (*givers.values(), *sinks)
    edges = []
    for node in nodes:
        for text in node.inputs:
            name, port = resolve_port(text, givers)
            if name not in givers:
                raise ConfigError(f'{node.kind} "{node.name}" reads "{text}", which is no source and no operator')
            edges.append(Edge(givers[name], port, node))
    return Graph(nodes, tuple(edges))


def split_port(text: str) -> tuple[str, str]:
    """Split an input into name and port: `totals.late` is port `late` of `totals`."""
    name, dot, port = text.rpartition(".")
    return (name, port) if dot else (text, "")


def resolve_port(text: str, names: Mapping[str, object] | Sequence[str]) -> tuple[str, str]:
    """Return name and port of an input, where names and ports may hold dots: the longest known name wins."""
    name = text
    while name and name not in names:
        name = name.rpartition(".")[0]
    return (name, text[len(name) + 1 :]) if name else split_port(text)


def find_source(options: PipelineOptions, text: str) -> tuple[SourceOptions, str] | None:
    """Return the source that an input names, and which of its ports; None if the input is an operator's."""
    names = [*(source.name for source in options.sources), *(operator.name for operator in options.operators)]
    name, port = resolve_port(text, names)
    return next(((source, port) for source in options.sources if source.name == name), None)


def operator_ports(options: PipelineOptions) -> set[str]:
    """Return the ports of sources that operators read: no table has their columns."""
    inputs = (port for operator in options.operators for port in operator.inputs)
    return {port for port in inputs if find_source(options, port) is not None}


def follower_ports(options: PipelineOptions) -> set[str]:
    """Return the ports of sources that go straight to sinks, but not to the deciding one."""
    deciding = decided_input(options)
    ports = {sink_input(options, sink) for sink in options.sinks} - {deciding}
    return {port for port in ports if find_source(options, port) is not None}


def decided_input(options: PipelineOptions) -> str:
    """Return the input of the deciding sink; empty for a journal, which takes no rows."""
    return "" if options.journal is not None else sink_input(options, options.deciding)


def sink_input(options: PipelineOptions, sink: SinkOptions) -> str:
    """Return the input of a sink; without `input`, the only candidate.

    Raises:
        ConfigError: there are several candidates.
    """
    if sink.input:
        return sink.input
    reads = {o.name: o.inputs for o in options.operators}
    candidates = default_inputs([s.name for s in options.sources], reads)
    if len(candidates) == 1:
        return candidates[0]
    raise ConfigError(f'sink "{sink.name}" needs an input: one of {", ".join(candidates)}')


def default_inputs(sources: Sequence[str], reads: Mapping[str, Sequence[str]]) -> list[str]:
    """Return the candidates for the input of a sink without `input`: operators that no operator reads, or the sources.

    `reads` has the inputs of every operator.
    """
    names = [*sources, *reads]
    taken = {resolve_port(text, names)[0] for inputs in reads.values() for text in inputs}
    return [name for name in reads if name not in taken] if reads else list(sources)


def output_key(operator: OperatorOptions) -> tuple[str, ...]:
    """Return the columns that identify a row of a built-in operator's output; empty if there are none."""
    match operator.type:
        case "aggregate":
            return (*operator.keys, "window_start") if operator.settings.get("window") else operator.keys
        case "correlate":
            return (*operator.keys, "alert_start")
    return ()


def topological(options: PipelineOptions) -> list[OperatorOptions]:
    """Return the operators, each after those it reads, otherwise in the order of the spec.

    Raises:
        ConfigError: operators read each other in a circle.
    """
    by_name = {o.name: o for o in options.operators}
    reads = {o.name: operators_read(o.inputs, by_name) for o in options.operators}
    order = sort_operators(reads)
    if len(order) < len(reads):
        raise ConfigError(f"operators read each other in a circle: {' -> '.join(find_cycle(reads) or ())}")
    return [by_name[name] for name in order]


def operators_read(inputs: Sequence[str], operators: Mapping[str, object]) -> list[str]:
    """Return the operators among these inputs, each once."""
    return list(dict.fromkeys(name for text in inputs if (name := resolve_port(text, operators)[0]) in operators))


def sort_operators(reads: Mapping[str, Sequence[str]]) -> list[str]:
    """Return the names, each after those it reads; operators in or behind a circle are left out."""
    order: list[str] = []
    while ready := next((n for n in reads if n not in order and all(r in order for r in reads[n])), None):
        order.append(ready)
    return order


def find_cycle(reads: Mapping[str, Sequence[str]]) -> list[str] | None:
    """Return a circle in the direction of the rows, with the first name again at its end; None if there is none."""
    stuck = [name for name in reads if name not in set(sort_operators(reads))]
    if not stuck:
        return None
    # Every stuck operator reads another stuck one, so walking back must meet a name twice.
    walk = [stuck[0]]
    while walk[-1] not in walk[:-1]:
        walk.append(next(r for r in reads[walk[-1]] if r in stuck))
    circle = walk[walk.index(walk[-1]) :][::-1]
    first = min(range(len(circle) - 1), key=lambda i: stuck.index(circle[i]))
    return [*circle[first:-1], *circle[:first], circle[first]]


def downstream(options: PipelineOptions, name: str) -> list[Node]:
    """Return every operator and sink that rows of a source or operator can reach, over all its ports."""
    graph = graph_of(options)
    reached = {name}
    for operator in topological(options):
        if any(e.source.name in reached for e in graph.edges if e.target.name == operator.name):
            reached.add(operator.name)
    targets = {e.target for e in graph.edges if e.source.name in reached}
    return [node for node in graph.nodes if node in targets]


def upstream(options: PipelineOptions, name: str) -> list[Node]:
    """Return every source and operator whose rows can reach an operator or one of its ports."""
    graph = graph_of(options)
    by_name = {n.name: n for n in graph.nodes if n.kind != "sink"}
    waiting, names = [resolve_port(name, by_name)[0]], set()
    while waiting:
        node = by_name[waiting.pop()]
        for text in node.inputs:
            source = resolve_port(text, by_name)[0]
            if source not in names:
                names.add(source)
                waiting.append(source)
    return [node for node in graph.nodes if node.kind != "sink" and node.name in names]


def stateful(options: PipelineOptions) -> list[OperatorOptions]:
    """Return the stateful operators, in topological order."""
    return [operator for operator in topological(options) if not operator.is_sql]
