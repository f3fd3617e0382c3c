"""Runs one SQL query over the state of an operator, in DuckDB: read-only, and without a way to any file."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import count
from typing import Any

import pyarrow as pa

from firnline.errors import ConfigError, FirnlineError
from firnline.state.export import StateReader

VIEW = "state"
# A query sees the view and nothing else: no files, no network, no variables of this process, and cannot ask for more.
_SETTINGS = (
    "SET TimeZone = 'UTC'",
    "SET python_enable_replacements = false",
    "SET enable_external_access = false",
)
_LOCK = "SET lock_configuration = true"


@dataclass(frozen=True, slots=True)
class Answer:
    """The first rows of a query's result; no two columns have one name. `more`: there are others."""

    columns: list[str]
    rows: list[tuple[Any, ...]]
    more: bool


class _Stream:
    """The state as Arrow streams, a new one whenever DuckDB asks: a query may read the view several times."""

    def __init__(self, reader: StateReader) -> None:
        self._reader = reader
        self.error: FirnlineError | OSError | None = None

    def __arrow_c_stream__(self, requested_schema: object = None) -> object:
        stream = pa.RecordBatchReader.from_batches(self._reader.schema, self._batches())
        return stream.__arrow_c_stream__(requested_schema)

    def _batches(self) -> Iterator[pa.RecordBatch]:
        try:
            for table in self._reader.scan():
                yield from table.to_batches()
        except (FirnlineError, OSError) as error:  # DuckDB would tell it in words of its own
            self.error = error
            raise


def query_state(reader: StateReader, sql: str, limit: int) -> Answer:
    """The first `limit` rows that a query gives over the view `state`.

    Raises:
        ConfigError: it is no single SELECT, or DuckDB refuses it.
    """
    import duckdb

    columns, stream = reader.schema.names, _Stream(reader)
    with duckdb.connect() as connection:
        for setting in _SETTINGS:
            connection.execute(setting)
        connection.register(VIEW, stream)
        connection.execute(_LOCK)
        try:
            statements = connection.extract_statements(sql)
            if len(statements) != 1 or statements[0].type != duckdb.StatementType.SELECT:
                raise ConfigError("--sql takes one SELECT", hint='--sql "select count(*) from state"')
            found = connection.sql(statements[0]).limit(limit + 1)
            rows = found.fetchall()
            return Answer(_distinct(found.columns), rows[:limit], len(rows) > limit)
        except duckdb.Error as error:
            if stream.error is not None:
                raise stream.error from error
            first = str(error).strip().splitlines()[0]
            raise ConfigError(
                f"the query cannot be run: {first}",
                hint=f"The view {VIEW!r} has the columns {', '.join(columns)}.",
            ) from error


def _distinct(names: Iterable[str]) -> list[str]:
    """Give names that come again a number: `n`, `n_1`."""
    taken: list[str] = []
    for name in names:
        free = (f"{name}_{number}" for number in count(1))
        taken.append(name if name not in taken else next(other for other in free if other not in taken))
    return taken
