"""Checks that the sections of a pipeline file fit together: names, inputs, circles, unread outputs, queries."""

from __future__ import annotations

import difflib
from collections.abc import Iterator, Mapping
from typing import NamedTuple

from firnline.config.fields import is_inside, same_place
from firnline.graph import default_inputs, find_cycle, operators_read, resolve_port
from firnline.options import names_tables
from firnline.sinks.config import SinkConfig
from firnline.spec.models import PipelineSpec
from firnline.spec.operators import (
    AggregateOperatorConfig,
    OperatorConfig,
    OwnOperatorConfig,
    SqlOperatorConfig,
    StatefulOperatorConfig,
)
from firnline.spec.problems import KeyPath, Origin, Problem, origin_of
from firnline.storage import is_remote

_UNREAD_HINT = "Name it in `inputs` of an operator or `input` of a sink, or remove it."


class Mismatch(NamedTuple):
    """One thing that does not fit; `path` leads to the key."""

    path: KeyPath
    message: str
    hint: str | None = None


def check_graph(spec: PipelineSpec) -> list[Mismatch]:
    """Return everything about a valid spec that does not fit together."""
    mismatches = [*_names(spec), *_locations(spec), *_state(spec)]
    inputs = [*_operator_inputs(spec), *_sink_inputs(spec)]
    circle = list(_circle(spec))
    # A wrong name or a circle also leaves something unread: only the cause is reported.
    return [*mismatches, *inputs, *circle, *(() if inputs or circle else (*_unread(spec), *_upserts(spec)))]


def _names(spec: PipelineSpec) -> Iterator[Mismatch]:
    taken: dict[str, str] = {}
    for name in spec.sources:
        if name.lower() in taken:
            yield Mismatch(("sources", name), f"differs from {taken[name.lower()]} in upper and lower case alone")
        taken[name.lower()] = f'source "{name}"'
        owner, port = resolve_port(name, ())
        if port and owner in spec.sources and spec.sources[owner].ports != ():
            yield Mismatch(("sources", name), f'source "{name}" would look like a port of source "{owner}"')
    sinks = {str(sink.name).lower(): f'sink "{sink.name}"' for sink in spec.sinks}
    for index, operator in enumerate(spec.operators):
        lower, at = operator.name.lower(), ("operators", index, "name")
        other = taken.get(lower) or sinks.get(lower)
        if other is not None:
            yield Mismatch(at, f'the name "{operator.name}" is taken by {other}', "Give it another name.")
        taken[lower] = f'operator "{operator.name}"'
        for source in spec.sources:
            name, port = resolve_port(source, ())
            if port and name.lower() == lower:
                yield Mismatch(at, f'source "{source}" would look like a port of operator "{operator.name}"')


def _locations(spec: PipelineSpec) -> Iterator[Mismatch]:
    """Check that no sink writes where a source reads or another sink writes."""
    for index, sink in enumerate(spec.sinks):
        written = sink.endpoint
        if written is None:
            continue
        at = ("sinks", index, written.key)
        for other in spec.sinks[:index]:
            if other.endpoint is not None and same_place(written.location, other.endpoint.location):
                yield Mismatch(at, f'sink "{other.name}" already writes to this {written.key}')
        for other in spec.sinks:
            if other is not sink and other.endpoint is not None and sink.may_write_to(other.endpoint.location):
                hint = "Narrow parts_allowed, or choose another folder."
                yield Mismatch(at, f'may name the {other.endpoint.key} of sink "{other.name}"', hint)
        for name, source in spec.sources.items():
            read = source.endpoint
            if read is not None and is_inside(written.location, read.location):
                verb = "is" if same_place(written.location, read.location) else "lies inside"
                yield Mismatch(at, f'the {written.key} {verb} the {read.key} of source "{name}"')


def find_home_problems(spec: PipelineSpec, home: str) -> Iterator[str]:
    """Yield why a folder or URI cannot be the home of a pipeline that decides in its journal."""
    for sink in spec.sinks:
        written = sink.endpoint
        if written is None:
            continue
        if same_place(home, written.location):
            yield f'the home {home} is the {written.key} of sink "{sink.name}"'
        elif is_inside(home, written.location):
            yield f'the home {home} lies inside the {written.key} of sink "{sink.name}"'
        elif is_inside(written.location, home):
            yield f'the {written.key} of sink "{sink.name}" lies inside the home {home}'
        elif sink.may_write_to(home):
            yield f'the home {home} may be named by the {written.key} of sink "{sink.name}"'
    for name, source in spec.sources.items():
        read = source.endpoint
        if read is None:
            continue
        if is_inside(home, read.location):
            verb = "is" if same_place(home, read.location) else "lies inside"
            yield f'the home {home} {verb} the {read.key} of source "{name}"'
        elif is_inside(read.location, home):
            yield f'the {read.key} of source "{name}" lies inside the home {home}'


def find_unshared(spec: PipelineSpec, home: str) -> str | None:
    """Return why the workers of a cluster do not reach a home; None if they do, or all run on this machine."""
    master = str(spec.spark.get("spark.master", "local"))
    if master.startswith("local") or is_remote(home):
        return None
    return f"the home {home} is on this machine alone, and with spark.master {master} every worker must reach it"


def _operator_inputs(spec: PipelineSpec) -> Iterator[Mismatch]:
    for index, operator in enumerate(spec.operators):
        for number, text in enumerate(operator.inputs):
            at = ("operators", index, "inputs", number)
            yield from _reference(spec, text, at)
            if names_tables(text):
                words = f'"{text}" are many tables, and an operator reads one at a time'
                yield Mismatch(at, words, "Name the tables one by one.")


def _sink_inputs(spec: PipelineSpec) -> Iterator[Mismatch]:
    for index, sink in enumerate(spec.sinks):
        at = ("sinks", index, "input")
        candidates = default_inputs(list(spec.sources), {o.name: o.inputs for o in spec.operators})
        if sink.input:
            yield from _reference(spec, sink.input, at)
            yield from _tables(spec, sink, at)
        elif len(candidates) > 1:
            names = ", ".join(candidates)
            yield Mismatch(at, f"missing, and there are several candidates: {names}", f"Add `input: {candidates[0]}`.")


def _tables(spec: PipelineSpec, sink: SinkConfig, at: KeyPath) -> Iterator[Mismatch]:
    """Check that a sink of many tables reads a captured database, and can hold them."""
    name, port = resolve_port(sink.input, list(spec.sources))
    if not names_tables(port) or name not in spec.sources:
        return
    if not spec.sources[name].has_keys:
        yield Mismatch(at, f'"{name}" captures no database, so it has no tables', f"Write `{name}`.")
    elif not sink.takes_tables:
        hint = "Use a Delta sink with `table: lake/{table}`, or name one table."
        yield Mismatch(at, f'"{sink.input}" are many tables, and this sink has room for one', hint)


def _reference(spec: PipelineSpec, text: str, at: KeyPath) -> Iterator[Mismatch]:
    """Check that an input names a source, an operator, or a port of one of them."""
    operators = {operator.name: operator for operator in spec.operators}
    ports = {name: source.ports for name, source in spec.sources.items()}
    ports |= {name: operator.ports for name, operator in operators.items()}
    names = list(ports)
    name, port = resolve_port(text, names)
    if name not in names:
        known = [*names, *(f"{name}.{port}" for name in names for port in ports[name] or ())]
        close = difflib.get_close_matches(text, known, n=1)
        words = f'did you mean "{close[0]}"?' if close else f"known: {', '.join(names)}"
        hint = f"Write `{close[0]}` instead of `{text}`." if close else None
        yield Mismatch(at, f'"{text}" is no source and no operator ({words})', hint)
    elif port and (of_node := ports[name]) is not None and port not in of_node:
        kind, node = ("operator", operators[name]) if name in operators else ("source", spec.sources[name])
        has = f"it has: {', '.join(of_node)}" if of_node else f"{node.type} has none"
        close = difflib.get_close_matches(port, of_node, n=1)
        hint = f"Write `{name}.{close[0]}` instead of `{text}`." if close else f"Write `{name}`."
        yield Mismatch(at, f'{kind} "{name}" has no port "{port}" ({has})', hint)


def _circle(spec: PipelineSpec) -> Iterator[Mismatch]:
    by_name = {operator.name: index for index, operator in enumerate(spec.operators)}
    circle = find_cycle({o.name: operators_read(o.inputs, by_name) for o in spec.operators})
    if circle is not None:
        at = ("operators", by_name[circle[0]], "inputs")
        hint = "Rows must lead from the sources to the sinks: take one of these out."
        yield Mismatch(at, f"operators read each other in a circle: {' -> '.join(circle)}", hint)


def _unread(spec: PipelineSpec) -> Iterator[Mismatch]:
    names = [*spec.sources, *(operator.name for operator in spec.operators)]
    texts = [text for operator in spec.operators for text in operator.inputs]
    texts += [sink_source(spec, index) for index in range(len(spec.sinks))]
    read = {resolve_port(text, names)[0] for text in texts}
    for name in spec.sources:
        if name not in read:
            yield Mismatch(("sources", name), "nothing reads it", _UNREAD_HINT)
    for index, operator in enumerate(spec.operators):
        if operator.name not in read:
            yield Mismatch(("operators", index, "name"), f'nothing reads operator "{operator.name}"', _UNREAD_HINT)


def sink_source(spec: PipelineSpec, index: int) -> str:
    """Return what a sink of a spec that fits together reads."""
    return spec.sinks[index].input or default_inputs(list(spec.sources), {o.name: o.inputs for o in spec.operators})[0]


def _upserts(spec: PipelineSpec) -> Iterator[Mismatch]:
    """Check that an upsert reads a changelog or a source, and has a key."""
    operators = {operator.name: operator for operator in spec.operators}
    hint = "Read a source, an aggregate, a correlate or an operator of your own, or write `write: append`."
    for index, sink in enumerate(spec.sinks):
        if sink.write != "upsert":
            continue
        at = ("sinks", index)
        text = sink_source(spec, index)
        name, port = resolve_port(text, [*spec.sources, *operators])
        operator = operators.get(name)
        if operator is None:
            if not sink.upserts_records:
                words = f'upsert needs a changelog, and "{text}" is a source'
                yield Mismatch((*at, "write"), words, hint)
            elif not sink.key and not (spec.sources[name].has_keys and port):
                words = "missing: a source does not say what identifies a row"
                yield Mismatch((*at, "key"), words, "Add `key: [...]`.")
            continue
        for setting in ("sequence_by", "delete_when"):
            if getattr(sink, setting, None):
                words = f'only for the records of a source, and "{text}" is an operator, whose changes have an order'
                yield Mismatch((*at, setting), words, "Remove it.")
        if operator.gives_changes is False or port in (operator.ports or ()):
            words = f'upsert needs a changelog, and "{text}" passes rows through unchanged'
            yield Mismatch((*at, "write"), words, hint)
        elif not sink.key and (lack := _find_no_key(operator)) is not None:
            yield Mismatch((*at, "key"), f"missing: {lack}", "Add `key: [...]`.")


def _find_no_key(operator: OperatorConfig) -> str | None:
    """Return why an operator does not define the key of its rows, or None when it does."""
    if isinstance(operator, SqlOperatorConfig):
        return "a query does not define what identifies a row"
    if isinstance(operator, OwnOperatorConfig):
        return "only the class itself knows what identifies a row"
    if isinstance(operator, AggregateOperatorConfig) and not operator.keys and operator.window is None:
        return "an aggregate without keys has no column that identifies its row"
    return None


def _state(spec: PipelineSpec) -> Iterator[Mismatch]:
    """Check that the names of removed or renamed operators are not in use."""
    names = {operator.name for operator in spec.operators}
    for index, name in enumerate(spec.state.dropped):
        if name in names:
            yield Mismatch(("state", "dropped", index), f'operator "{name}" is still there')
    renamed: dict[str, str] = {}
    for index, operator in enumerate(spec.operators):
        if not isinstance(operator, StatefulOperatorConfig):
            continue
        old, at = operator.renamed_from, ("operators", index, "renamed_from")
        if old and old in names:
            yield Mismatch(at, f'operator "{old}" is still there')
        elif old and old in spec.state.dropped:
            yield Mismatch(at, f'the state of "{old}" is dropped by state.dropped')
        elif old and old in renamed:
            yield Mismatch(at, f'operator "{renamed[old]}" takes over the state of "{old}" already')
        renamed[old] = operator.name
        if operator.interval_ms is not None and spec.checkpoint.mode == "aligned":
            words = "only with checkpoint.mode: per_operator (here it is aligned)"
            yield Mismatch(("operators", index, "interval_ms"), words)


def query_problems(spec: PipelineSpec, origins: Mapping[KeyPath, Origin]) -> Iterator[Problem]:
    """Find what is wrong with the queries; a spec without any does not load the SQL parser."""
    for index, operator in enumerate(spec.operators):
        if isinstance(operator, SqlOperatorConfig):
            from firnline.sql import check_query

            path = ("operators", index, "query")
            origin = origin_of(path, origins)
            for finding in check_query(operator.query, operator.inputs):
                yield Problem(origin.at(finding.line), path, finding.message, finding.hint)
