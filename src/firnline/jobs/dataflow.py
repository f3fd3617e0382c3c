"""The routing of rows: which sinks and operators take the output of each source and operator. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from firnline.checkpoint.codec import canonical, checksum
from firnline.exchange import Edge
from firnline.graph import find_source, sink_input, topological
from firnline.options import OperatorOptions, PipelineOptions
from firnline.sources.base import MAIN_PORT
from firnline.state.manifest import Ranges
from firnline.types import Json


@dataclass(frozen=True, slots=True)
class Dataflow:
    """The pipeline's graph for its jobs. A port is a source's or an operator's name, or `<name>.<port>` of one."""

    operators: tuple[OperatorOptions, ...]  # in topological order
    wanted_ports: Mapping[str, tuple[str, ...]]  # source -> its own names of the ports that a sink or operator reads
    sinks: Mapping[str, tuple[str, ...]]  # port -> names of sinks
    readers: Mapping[str, tuple[OperatorOptions, ...]]  # port -> operators
    key_groups: int

    @property
    def stateful(self) -> tuple[OperatorOptions, ...]:
        """The stateful operators, in topological order."""
        return tuple(o for o in self.operators if not o.is_sql)

    def sinks_of(self, port: str) -> tuple[str, ...]:
        """Return the names of the sinks that take the rows of a port."""
        return self.sinks.get(port, ())

    def edges_of(self, port: str, ranges: Ranges) -> list[Edge]:
        """Return the edges that a job for a port writes: one for all SQL operators, one per stateful operator by its
        own key."""
        readers = self.readers.get(port, ())
        edges = [Edge(sql_edge(port))] if any(o.is_sql for o in readers) else []
        for operator in (o for o in readers if not o.is_sql):
            edges.append(
                Edge(
                    keyed_edge(operator.name, port),
                    keys=operator.keys,
                    ranges=ranges,
                    groups=self.key_groups,
                    time=str(operator.settings.get("time") or ""),
                )
            )
        return edges

    def inputs_of_query(self, operator: OperatorOptions) -> list[str]:
        """Return the sources and ports that a query reads, directly or through other queries."""
        inputs: dict[str, None] = {}
        for port in operator.inputs:
            above = self._find_query(port)
            inputs |= dict.fromkeys(self.inputs_of_query(above)) if above is not None else {port: None}
        return list(inputs)

    def queries_above(self, operator: OperatorOptions) -> set[str]:
        """Return the queries that a query reads, directly or through others."""
        above = [query for port in operator.inputs if (query := self._find_query(port)) is not None]
        return {name for query in above for name in (query.name, *self.queries_above(query))}

    def _find_query(self, port: str) -> OperatorOptions | None:
        return next((o for o in self.operators if o.name == port and o.is_sql), None)

    def ports_of(self, operator: OperatorOptions) -> list[str]:
        """Return the ports of an operator that have readers, its main one first."""
        known = [p for p in {**self.sinks, **self.readers} if p == operator.name or p.startswith(f"{operator.name}.")]
        return sorted(known, key=lambda port: (port != operator.name, port))


def sql_edge(port: str) -> str:
    """Return the name of the edge from a port to all queries that read it."""
    return f"sql<{port}"


def keyed_edge(operator: str, port: str) -> str:
    """Return the name of the edge from a port to one stateful operator."""
    return f"{operator}<{port}"


def shape_of(operator: OperatorOptions) -> str:
    """Return a fingerprint of the operator settings that its state depends on; checkpoints keep it."""
    settings: dict[str, Json] = {"keys": list(operator.keys), "window": operator.settings.get("window")}
    if operator.type == "correlate":
        settings["inputs"] = list(operator.inputs)  # the state refers to them by position
    return checksum(canonical(settings))[:32]


def dataflow_of(options: PipelineOptions) -> Dataflow:
    """Derive the routing of rows from the options."""
    operators = tuple(topological(options))
    sinks: dict[str, list[str]] = {}
    for sink in options.sinks:
        sinks.setdefault(sink_input(options, sink), []).append(sink.name)
    readers: dict[str, list[OperatorOptions]] = {}
    for operator in operators:
        for port in dict.fromkeys(operator.inputs):
            readers.setdefault(port, []).append(operator)
    wanted: dict[str, set[str]] = {source.name: set() for source in options.sources}
    for text in (*sinks, *readers):
        if (read := find_source(options, text)) is not None:
            source, port = read
            wanted[source.name].add(port)
    return Dataflow(
        operators,
        {name: tuple(sorted(ports)) or (MAIN_PORT,) for name, ports in wanted.items()},
        {port: tuple(names) for port, names in sinks.items()},
        {port: tuple(of_port) for port, of_port in readers.items()},
        options.state.key_groups,
    )
