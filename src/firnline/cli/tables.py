"""Arguments of commands on tables: paths or URIs of tables, or spec files, which stand for their tables."""

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

TABLES_HELP = "Tables (path or URI), or specs: all their staged tables. [default: firnline.yml here or above]"
Tables = Annotated[str, Parameter(help=TABLES_HELP, show_default=False)]
Table = Annotated[str, Parameter(help="The table (path or URI), or a spec: its first staged table.")]
TableOrSpec = Annotated[str, Parameter(help="The table (path or URI), or a spec file: all its tables.")]


@dataclass(slots=True)
class Named:
    """The tables that the arguments name, with their storage options."""

    tables: dict[str, dict[str, str]] = field(default_factory=dict)  # uri -> storage options
    poll_interval_secs: float | None = None


def named_tables(arguments: Sequence[str]) -> Named:
    """Resolve arguments; a spec stands for its staged sinks."""
    named = Named()
    for text in arguments or ("",):
        if text and not _is_spec(text):
            named.tables[normalise(text)] = {}
            continue
        options = load_options(text or None)
        staged = {normalise(s.table): dict(s.storage_options) for s in options.sinks if s.mode == "staged"}
        if not staged:
            raise ConfigError(
                f"pipeline {options.name!r} has no staged sink",
                hint="Set mode: staged on a sink, or name a table instead of a spec.",
            )
        named.tables |= staged
        named.poll_interval_secs = options.staging.poll_interval_secs
    return named


@dataclass(frozen=True, slots=True)
class Target:
    """One table to sweep, and the ledgers of pipelines that have it as a further sink."""

    uri: str
    storage_options: dict[str, str]
    ledgers: dict[str, Storage] = field(default_factory=dict)


def find_targets(argument: str) -> list[Target]:
    """Find the named table, or every table of a spec, the deciding sink's first."""
    if not _is_spec(argument):
        return [Target(normalise(argument), {})]
    options = load_options(argument)
    deciding = options.deciding
    ledger = open_storage(deciding.table, deciding.storage_options)
    targets = {normalise(deciding.table): Target(normalise(deciding.table), dict(deciding.storage_options))}
    for sink in options.sinks:
        uri = normalise(sink.table)
        targets.setdefault(uri, Target(uri, dict(sink.storage_options), {options.name: ledger}))
    return list(targets.values())


def find_pipeline(argument: str) -> PipelineOptions | None:
    """Load the pipeline of a spec; None if the argument is a table."""
    return load_options(argument) if _is_spec(argument) else None


def _is_spec(text: str) -> bool:
    if text.endswith((".yml", ".yaml")):
        return True
    return any(os.path.isfile(os.path.join(text, name)) for name in ("firnline.yml", "firnline.yaml"))
