"""Checks that the sections of a pipeline file fit together: names, inputs, circles, and unread outputs."""

from __future__ import annotations

import difflib
from collections.abc import Iterator
from typing import NamedTuple

from firnline.graph import default_inputs, find_cycle, operators_read, resolve_port
from firnline.spec.models import PipelineSpec
from firnline.spec.operators import (
    AggregateOperatorConfig,
    OperatorConfig,
    OwnOperatorConfig,
    SqlOperatorConfig,
    StatefulOperatorConfig,
)
from firnline.spec.problems import KeyPath

__all__ = ["Mismatch", "check_graph", "sink_source"]

_UNREAD_HINT = "Name it in `inputs` of an operator or `input` of a sink, or remove it."


class Mismatch(NamedTuple):
    """One thing that does not fit; `path` leads to the key."""

    path: KeyPath
    message: str
    hint: str | None = None


def check_graph(spec: PipelineSpec) -> list[Mismatch]:
    """Return everything about a valid spec that does not fit together."""
    mismatches = [*_names(spec), *_state(spec)]
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


def _operator_inputs(spec: PipelineSpec) -> Iterator[Mismatch]:
    for index, operator in enumerate(spec.operators):
        for number, text in enumerate(operator.inputs):
            yield from _reference(spec, text, ("operators", index, "inputs", number))


def _sink_inputs(spec: PipelineSpec) -> Iterator[Mismatch]:
    for index, sink in enumerate(spec.sinks):
        at = ("sinks", index, "input")
        candidates = default_inputs(list(spec.sources), {o.name: o.inputs for o in spec.operators})
        if sink.input:
            yield from _reference(spec, sink.input, at)
        elif len(candidates) > 1:
            names = ", ".join(candidates)
            yield Mismatch(at, f"missing, and there are several candidates: {names}", f"Add `input: {candidates[0]}`.")


def _reference(spec: PipelineSpec, text: str, at: KeyPath) -> Iterator[Mismatch]:
    """Check that an input names a source, an operator, or a port of an operator."""
    operators = {operator.name: operator for operator in spec.operators}
    names = [*spec.sources, *operators]
    name, port = resolve_port(text, names)
    if name not in names:
        known = [*names, *(f"{o.name}.{p}" for o in spec.operators for p in o.ports or ())]
        close = difflib.get_close_matches(text, known, n=1)
        words = f'did you mean "{close[0]}"?' if close else f"known: {', '.join(names)}"
        hint = f"Write `{close[0]}` instead of `{text}`." if close else None
        yield Mismatch(at, f'"{text}" is no source and no operator ({words})', hint)
    elif port and name not in operators:
        yield Mismatch(at, f'source "{name}" has no port "{port}"', f"Write `{name}`.")
    elif port:
        ports = operators[name].ports
        if ports is not None and port not in ports:
            has = f"it has: {', '.join(ports)}" if ports else f"{operators[name].type} has none"
            yield Mismatch(at, f'operator "{name}" has no port "{port}" ({has})', f"Write `{name}`.")


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
    """Check that an upsert reads a changelog and has a key."""
    operators = {operator.name: operator for operator in spec.operators}
    hint = "Read an aggregate, a correlate or an operator of your own, or write `write: append`."
    for index, sink in enumerate(spec.sinks):
        if sink.write != "upsert":
            continue
        at = ("sinks", index)
        text = sink_source(spec, index)
        name, port = resolve_port(text, [*spec.sources, *operators])
        operator = operators.get(name)
        if operator is None:
            words = f'upsert needs a changelog, and "{text}" is a source'
            yield Mismatch((*at, "write"), words, hint)
        elif operator.gives_changes is False or port in (operator.ports or ()):
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
