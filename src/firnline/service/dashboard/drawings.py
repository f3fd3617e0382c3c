"""Drawings as numbers for SVG: sparklines, the bars of epochs, and the graph of a pipeline. No text, no markup."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from firnline.graph import Edge, Graph, Node
from firnline.types import Json

SPARK_WIDTH, SPARK_HEIGHT = 120, 22
STEPS = ("plan", "run", "stage", "commit", "record")  # in their order; `checkpoint` is part of `run`
BAR_WIDTH = 1000

NODE_WIDTH, NODE_HEIGHT = 218, 76
GAP_X, GAP_Y, MARGIN = 74, 18, 4


def spark(rates: Sequence[float]) -> str:
    """Return the points of a sparkline, scaled to its own highest rate; empty without two rates."""
    if len(rates) < 2:
        return ""
    top = max(rates) or 1.0
    step = SPARK_WIDTH / (len(rates) - 1)
    return " ".join(
        f"{index * step:.0f},{SPARK_HEIGHT - 2 - rate / top * (SPARK_HEIGHT - 4):.0f}"
        for index, rate in enumerate(rates)
    )


@dataclass(frozen=True, slots=True)
class Bar:
    """One step of an epoch."""

    step: str
    milliseconds: int
    x: float
    width: float


def bars(durations_ms: Mapping[str, Json], longest_ms: float) -> list[Bar]:
    """Return the steps of an epoch one after another; the longest epoch fills the width."""
    found, x = [], 0.0
    for step in STEPS:
        ms = int(durations_ms.get(step) or 0)
        if ms > 0:
            width = ms / max(longest_ms, 1) * BAR_WIDTH
            found.append(Bar(step, ms, round(x, 1), round(max(width, 1.0), 1)))
            x += width
    return found


@dataclass(frozen=True, slots=True)
class Box:
    """A node of the graph, and where it stands."""

    node: Node
    x: int
    y: int


@dataclass(frozen=True, slots=True)
class Line:
    """An edge of the graph: the path of a curve, and the port that it leaves."""

    path: str
    port: str
    x: int
    y: int


@dataclass(frozen=True, slots=True)
class GraphDrawing:
    """A graph that is laid out from left to right."""

    boxes: list[Box]
    lines: list[Line]
    width: int
    height: int


def draw(graph: Graph) -> GraphDrawing:
    """Lay out a graph: sources on the left, each operator right of what it reads, sinks in the last column.

    A line that passes a column has a free place in it, so that it crosses no box.
    """
    columns = _columns(graph)
    last = max(columns.values(), default=0)
    columns |= {_key(node): last for node in graph.nodes if node.kind == "sink"}
    rows: dict[int, list[object]] = {column: [] for column in range(last + 1)}
    for node in graph.nodes:
        rows[columns[_key(node)]].append(_key(node))
    for edge in graph.edges:
        for column in range(columns[_key(edge.source)] + 1, columns[_key(edge.target)]):
            rows[column].append(edge)
    tallest = max(len(places) for places in rows.values())
    height = tallest * (NODE_HEIGHT + GAP_Y) - GAP_Y + 2 * MARGIN
    at: dict[tuple[object, int], tuple[int, int]] = {}
    for column, places in rows.items():
        top = (height - len(places) * (NODE_HEIGHT + GAP_Y) + GAP_Y) // 2
        for index, place in enumerate(places):
            at[place, column] = MARGIN + column * (NODE_WIDTH + GAP_X), top + index * (NODE_HEIGHT + GAP_Y)
    boxes = [Box(node, *at[_key(node), columns[_key(node)]]) for node in graph.nodes]
    lines = []
    for edge in graph.edges:
        first, end = columns[_key(edge.source)], columns[_key(edge.target)]
        x, y = at[_key(edge.source), first]
        x, y = x + NODE_WIDTH, y + NODE_HEIGHT // 2
        path, start = f"M{x} {y}", (x, y)
        for column in range(first + 1, end):
            x, y, path = _bend(path, x, y, *at[edge, column])
            x += NODE_WIDTH
            path += f"H{x}"
        _, _, path = _bend(path, x, y, *at[_key(edge.target), end])
        lines.append(Line(path, edge.port, start[0] + 6, start[1] - 6))
    return GraphDrawing(boxes, lines, (last + 1) * (NODE_WIDTH + GAP_X) - GAP_X + 2 * MARGIN, height)


def _bend(path: str, x: int, y: int, to_x: int, to_y: int) -> tuple[int, int, str]:
    """Add a curve to the left side of a place."""
    to_y, half = to_y + NODE_HEIGHT // 2, (to_x - x) // 2
    return to_x, to_y, f"{path}C{x + half} {y} {to_x - half} {to_y} {to_x} {to_y}"


def _columns(graph: Graph) -> dict[tuple[str, str], int]:
    """Return the column of each node: one more than the last of what it reads."""
    found = {_key(node): 0 for node in graph.nodes}
    forward = [edge for edge in graph.edges if edge not in _find_closing(graph)]
    for _ in graph.nodes:
        changed = False
        for edge in forward:
            least = found[_key(edge.source)] + 1
            if found[_key(edge.target)] < least <= len(graph.nodes):
                found[_key(edge.target)] = least
                changed = True
        if not changed:
            break
    return found


def _find_closing(graph: Graph) -> set[Edge]:
    """Return edges without which the graph has no cycle; pipelines may read from each other."""
    found: set[Edge] = set()
    reached: dict[tuple[str, str], set[tuple[str, str]]] = {_key(node): {_key(node)} for node in graph.nodes}
    for edge in graph.edges:
        source, target = _key(edge.source), _key(edge.target)
        if source in reached[target]:
            found.add(edge)
            continue
        for ends in reached.values():
            if source in ends:
                ends |= reached[target]
    return found


def _key(node: Node) -> tuple[str, str]:
    return node.kind, node.name
