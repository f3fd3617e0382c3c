"""Which tables of a database a source captures: names and patterns."""

from __future__ import annotations

import difflib
import fnmatch
import json
import shlex
from collections.abc import Collection, Iterable, Sequence


class TablePatterns:
    """Tables by name: `schema.table`, with `*` and `?` for any characters. A name without a dot has the default schema.

    A pattern that begins with `!` excludes tables; order does not matter. Tables of the schemas `never` are never
    captured: those of the server, and Firnline's own.
    """

    def __init__(self, patterns: Sequence[str], default_schema: str, never: Collection[str] = ()) -> None:
        self._never, self._default_schema = frozenset(never), default_schema
        full = [pattern if "." in pattern else _prefixed(pattern, default_schema) for pattern in patterns]
        self.patterns = tuple(full)
        self._included = [pattern for pattern in full if not pattern.startswith("!")]
        self._excluded = [pattern[1:] for pattern in full if pattern.startswith("!")]

    def covers(self, table: str) -> bool:
        """Return whether a table (`schema.table`) is captured."""
        if table.partition(".")[0] in self._never:
            return False
        return _matches(table, self._included) and not _matches(table, self._excluded)

    def may_cover(self, port: str) -> bool:
        """Return whether a port, a table with or without its schema, may be captured, now or once it is named again: a
        table that is left out for a while keeps its sinks."""
        if "." in port or self._default_schema:
            return _matches(port if "." in port else f"{self._default_schema}.{port}", self._included)
        return any(fnmatch.fnmatchcase(port, pattern.partition(".")[2]) for pattern in self._included)

    @property
    def names(self) -> list[str]:
        """The tables that are named one by one."""
        return [pattern for pattern in self._included if not any(sign in pattern for sign in "*?[")]


def snapshot_command(source: str | None, table: str, *, empties: bool = False) -> str:
    """Return the command that reads a table again, as a person pastes it into a shell. Without a source, the table
    alone names it: enough for a pipeline with one database."""
    name = f"--table={shlex.quote(table)}" if table.startswith("-") else f"--table {shlex.quote(table)}"
    named = f" --source {shlex.quote(source)}" if source is not None else ""
    return f"firnline snapshot {name}{' --empty' * empties}{named}"


def without_table(table: str) -> str:
    """Return the line of a spec that leaves a table out."""
    return f"tables: [{json.dumps(f'!{table}', ensure_ascii=False)}]"


def port_of(table: str, default_schema: str) -> str:
    """Return the port of a table (`schema.table`): its name, with its schema if that is not the default one."""
    schema, _, name = table.partition(".")
    return name if schema == default_schema else table


def name_like(table: str, names: Iterable[str]) -> str:
    """Return a question for the table of nearly this name, with a blank behind it; empty if there is none."""
    lower = {name.lower(): name for name in sorted(names)}
    close = difflib.get_close_matches(table.lower(), list(lower), n=1, cutoff=0.8)
    return f"Did you mean {lower[close[0]]}? " if close else ""


def tables_of_port(port: str, default_schema: str) -> TablePatterns:
    """Return the tables that a port with a pattern stands for: `*` is every table that the source captures."""
    return TablePatterns(("*.*" if port == "*" else port,), default_schema)


def _prefixed(pattern: str, schema: str) -> str:
    return f"!{schema}.{pattern[1:]}" if pattern.startswith("!") else f"{schema}.{pattern}"


def _matches(table: str, patterns: Sequence[str]) -> bool:
    return any(fnmatch.fnmatchcase(table, pattern) for pattern in patterns)
