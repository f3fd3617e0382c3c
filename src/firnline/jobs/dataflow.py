"""Where rows go: which sinks and operators take what comes out of each source and operator. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from firnline.checkpoint.codec import canonical, checksum
from firnline.exchange import Edge
from firnline.graph import sink_input, topological
from firnline.options import OperatorOptions, PipelineOptions
from firnline.state.manifest import Ranges
from firnline.types import Json


@dataclass(frozen=True, slots=True)
class Dataflow:
    """The pipeline's graph as its jobs see it. A port is a source's or an operator's name, or `<operator>.<port>`."""

    operators: tuple[OperatorOptions, ...]  # each after those it reads
    sinks: Mapping[str, tuple[str, ...]]  # port -> names of sinks
    readers: Mapping[str, tuple[OperatorOptions, ...]]  # port -> operators
    key_groups: int

    @property
    def stateful(self) -> tuple[OperatorOptions, ...]:
        """The operators that have state, each after those it reads."""
        return tuple(o for o in self.operators if not o.is_sql)

    def sinks_of(self, port: str) -> tuple[str, ...]:
        """The names of the sinks that take the rows of a port."""
        return self.sinks.get(port, ())

    def edges_of(self, port: str, ranges: Ranges) -> list[Edge]:
        """What a job that fills a port hands on: once to all SQL operators, to each stateful one by its own key."""
        readers = self.readers.get(port, ())
        found = [Edge(sql_edge(port))] if any(o.is_sql for o in readers) else []
        for operator in (o for o in readers if not o.is_sql):
            found.append(
                Edge(
                    keyed_edge(operator.name, port),
                    keys=operator.keys,
                    ranges=ranges,
                    groups=self.key_groups,
                    time=str(operator.settings.get("time") or ""),
                )
            )
        return found

    def inputs_of_query(self, operator: OperatorOptions) -> list[str]:
        """The sources and ports that a query reads, directly or through other queries."""
        found: dict[str, None] = {}
        for port in operator.inputs:
            above = self._find_query(port)
            found |= dict.fromkeys(self.inputs_of_query(above)) if above is not None else {port: None}
        return list(found)

    def queries_above(self, operator: OperatorOptions) -> set[str]:
        """The queries that a query reads, directly or through others."""
        above = [found for port in operator.inputs if (found := self._find_query(port)) is not None]
        return {name for query in above for name in (query.name, *self.queries_above(query))}

    def _find_query(self, port: str) -> OperatorOptions | None:
        return next((o for o in self.operators if o.name == port and o.is_sql), None)

    def ports_of(self, operator: OperatorOptions) -> list[str]:
        """The ports of an operator that somebody reads, its main one first."""
        known = [p for p in {**self.sinks, **self.readers} if p == operator.name or p.startswith(f"{operator.name}.")]
        return sorted(known, key=lambda port: (port != operator.name, port))


def sql_edge(port: str) -> str:
    """The name of the edge from a port to all queries that read it."""
    return f"sql<{port}"


def keyed_edge(operator: str, port: str) -> str:
    """The name of the edge from a port to one stateful operator."""
    return f"{operator}<{port}"


def shape_of(operator: OperatorOptions) -> str:
    """What of an operator's settings its state cannot be read without; kept in its checkpoints."""
    settings: dict[str, Json] = {"keys": list(operator.keys), "window": operator.settings.get("window")}
    if operator.type == "correlate":
        settings["inputs"] = list(operator.inputs)  # the state knows them by their place
    return checksum(canonical(settings))[:32]


def dataflow_of(options: PipelineOptions) -> Dataflow:
    """Work out where rows go."""
    operators = tuple(topological(options))
    sinks: dict[str, list[str]] = {}
    for sink in options.sinks:
        sinks.setdefault(sink_input(options, sink), []).append(sink.name)
    readers: dict[str, list[OperatorOptions]] = {}
    for operator in operators:
        for port in dict.fromkeys(operator.inputs):
            readers.setdefault(port, []).append(operator)
    return Dataflow(
        operators,
        {port: tuple(names) for port, names in sinks.items()},
        {port: tuple(found) for port, found in readers.items()},
        options.state.key_groups,
    )
