"""A pipeline's graph: drawn as boxes and arrows in 80 columns, and as JSON."""

from __future__ import annotations

from typing import Any

from firnline.cli.output import shorten
from firnline.graph import Graph, Node, graph_of, topological
from firnline.options import PipelineOptions

NAME_WIDTH = 21
BOX_WIDTH = 22
ARROW = " ---> "


def graph_json(options: PipelineOptions, shards: int | None) -> dict[str, Any]:
    """Return the graph as plain values: nodes in topological order, and the edges between them."""
    graph = graph_of(options)
    return {
        "nodes": [
            {
                "name": node.name,
                "kind": node.kind,
                "type": node.type,
                "shards": shards if _keeps_state(node) else None,
                "idle_after_secs": _idle_after(node, options),
            }
            for node in _in_order(options, graph)
        ],
        "edges": [
            {
                "from": edge.source.name,
                "port": edge.port or None,
                "to": edge.target.name,
                "to_kind": edge.target.kind,
            }
            for edge in graph.edges
        ],
    }


def draw_graph(options: PipelineOptions, shards: int | None) -> list[str]:
    """Draw the graph as lines: a box per node, from sources to sinks, with its inputs and its readers."""
    graph = graph_of(options)
    lines: list[str] = []
    for node in _in_order(options, graph):
        reads = [edge for edge in graph.edges if edge.target == node]
        gives = [edge for edge in graph.edges if edge.source == node]
        left = [f"{e.source.name}.{e.port}" if e.port else e.source.name for e in reads]
        right = [f"{e.target.name} ({e.port})" if e.port else e.target.name for e in gives]
        lines += _box([node.name, _about(node, options, shards)], left, right)
    return lines


def _in_order(options: PipelineOptions, graph: Graph) -> list[Node]:
    order = {operator.name: number for number, operator in enumerate(topological(options))}
    operators = sorted((n for n in graph.nodes if n.kind == "operator"), key=lambda node: order[node.name])
    sources = [node for node in graph.nodes if node.kind == "source"]
    return [*sources, *operators, *(node for node in graph.nodes if node.kind == "sink")]


def _keeps_state(node: Node) -> bool:
    return node.kind == "operator" and node.type != "sql"


def _idle_after(node: Node, options: PipelineOptions) -> float | None:
    found = [o.idle_after for o in options.operators if o.name == node.name and o.idle_after is not None]
    return found[0].total_seconds() if found else None


def _about(node: Node, options: PipelineOptions, shards: int | None) -> str:
    if node.kind == "sink":
        write = next(sink.write for sink in options.sinks if sink.name == node.name)
        return f"{node.type}, {write}"
    if _keeps_state(node) and shards is not None:
        return f"{node.type}, {shards} shard{'' if shards == 1 else 's'}"
    return node.type


def _box(texts: list[str], left: list[str], right: list[str]) -> list[str]:
    indent = " " * (NAME_WIDTH + len(ARROW))
    edge = f"{indent}+{'-' * BOX_WIDTH}+"
    lines = [edge]
    for row in range(max(len(texts), len(left), len(right))):
        read = f"{shorten(left[row], NAME_WIDTH):>{NAME_WIDTH}}{ARROW}" if row < len(left) else indent
        text = shorten(texts[row], BOX_WIDTH - 2) if row < len(texts) else ""
        given = f"{ARROW}{shorten(right[row], NAME_WIDTH)}" if row < len(right) else ""
        lines.append(f"{read}| {text:<{BOX_WIDTH - 2}} |{given}")
    return [*lines, edge]
