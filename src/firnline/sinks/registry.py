"""The kinds of sinks by name. To add one: a folder with a module like `sinks/delta/kind.py`, and its line in `KINDS`.

Such a module has three functions:
- `open_sink(options, context) -> Sink`, in the driver;
- `open_stager(target, attempt) -> Stager`, in a worker; `target` comes from `Sink.stage_target`;
- `run_task(task) -> report`, in a worker: what `Sink.commit` handed to `run_tasks`. A task says `kind: commit` and
  `type`, the kind of the sink. A kind whose commits need no tasks leaves it out.
"""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from typing import Any

from firnline.errors import ConfigError
from firnline.options import SinkOptions
from firnline.sinks.base import Sink, SinkContext, Stager
from firnline.types import Json

KINDS = {
    "delta": "firnline.sinks.delta.kind",
}  # by `type` of the spec: the module, imported when a sink of that kind is opened


def open_sinks(opened: Sequence[tuple[SinkOptions, SinkContext]]) -> tuple[Sink, ...]:
    """Open the sinks of a pipeline, the deciding one first, and check that each has the required capabilities.

    Raises:
        ConfigError: a sink's kind cannot decide, or cannot upsert, and should.
    """
    sinks = []
    for options, context in opened:
        sink: Sink = _kind(options.type).open_sink(options, context)
        if context.decides and not sink.capabilities.decides:
            raise ConfigError(
                f"sink {sink.name!r} ({options.type}) comes first, and a sink of that kind cannot decide",
                hint="List a sink that can decide first, with required: true, for example a Delta table.",
            )
        if options.write == "upsert" and not sink.capabilities.upserts:
            raise ConfigError(
                f"sink {sink.name!r} ({options.type}) cannot apply changes by key",
                hint="Write `write: append`, or upsert into another sink.",
            )
        sinks.append(sink)
    return tuple(sinks)


def open_stager(target: dict[str, Json], attempt: str) -> Stager:
    """Open the stager for a sink's target, in a worker."""
    stager: Stager = _kind(str(target["type"])).open_stager(target, attempt)
    return stager


def run_task(task: dict[str, Json]) -> dict[str, Json]:
    """Perform a task of a sink's commit, in a worker. Raises the errors of the sink's kind."""
    report: dict[str, Json] = _kind(str(task["type"])).run_task(task)
    return report


def _kind(name: str) -> Any:
    try:
        return importlib.import_module(KINDS[name])
    except KeyError as error:
        raise ConfigError(f"there is no kind of sink {name!r}", hint=f"Known kinds: {', '.join(KINDS)}.") from error
