"""Arguments of commands that work on tables: table paths or URIs, or spec files whose tables are meant."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Annotated

from cyclopts import Parameter

from firnline.cli.common import load_options
from firnline.errors import ConfigError
from firnline.storage import Storage, normalise, open_storage

if TYPE_CHECKING:
    from firnline.options import PipelineOptions

TABLES_HELP = "Tables (path or URI), or spec files whose staged tables are meant. [default: firnline.yml here or above]"
Tables = Annotated[str, Parameter(help=TABLES_HELP, show_default=False)]
Table = Annotated[str, Parameter(help="The table: a path or URI; or a spec, whose first staged table is meant.")]
TableOrSpec = Annotated[str, Parameter(help="The table (path or URI), or a spec file: all its tables.")]


@dataclass(slots=True)
class Named:
    """The tables that the arguments name, with what it takes to reach them."""

    tables: dict[str, dict[str, str]] = field(default_factory=dict)  # uri -> storage options
    poll_interval_secs: float | None = None


def named_tables(arguments: Sequence[str]) -> Named:
    """Resolve arguments; a spec stands for its staged sinks."""
    found = Named()
    for text in arguments or ("",):
        if text and not _is_spec(text):
            found.tables[normalise(text)] = {}
            continue
        options = load_options(text or None)
        staged = {normalise(s.table): dict(s.storage_options) for s in options.sinks if s.mode == "staged"}
        if not staged:
            raise ConfigError(
                f"pipeline {options.name!r} has no staged sink",
                hint="Set mode: staged on a sink, or name a table instead of a spec.",
            )
        found.tables |= staged
        found.poll_interval_secs = options.staging.poll_interval_secs
    return found


@dataclass(frozen=True, slots=True)
class Target:
    """One table to sweep, and where the ledger lies of a pipeline that has it as a further sink."""

    uri: str
    storage_options: dict[str, str]
    ledgers: dict[str, Storage] = field(default_factory=dict)


def find_targets(argument: str) -> list[Target]:
    """The table that is named, or every table of a spec, the deciding sink's first."""
    if not _is_spec(argument):
        return [Target(normalise(argument), {})]
    options = load_options(argument)
    deciding = options.deciding
    ledger = open_storage(deciding.table, deciding.storage_options)
    found = {normalise(deciding.table): Target(normalise(deciding.table), dict(deciding.storage_options))}
    for sink in options.sinks:
        uri = normalise(sink.table)
        found.setdefault(uri, Target(uri, dict(sink.storage_options), {options.name: ledger}))
    return list(found.values())


def find_pipeline(argument: str) -> PipelineOptions | None:
    """The pipeline of a spec; None when a table is named."""
    return load_options(argument) if _is_spec(argument) else None


def _is_spec(text: str) -> bool:
    if text.endswith((".yml", ".yaml")):
        return True
    return any(os.path.isfile(os.path.join(text, name)) for name in ("firnline.yml", "firnline.yaml"))
