"""Reads the state of one operator as plain rows: all, some keys, a count, an SQL query; exports Parquet."""

from __future__ import annotations

import contextlib
import os
import uuid
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import count
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from firnline.errors import ConfigError, FirnlineError, StateDamagedError
from firnline.faults import fault_point
from firnline.names import temporary_beside
from firnline.state.columns import TIMER, Layout, can_widen
from firnline.state.home import StateHome
from firnline.state.keys import EncodedKeys, encode_keys, key_groups_of, locate, shard_of
from firnline.state.lookup import SCAN_ROWS, combined, lookup
from firnline.state.manifest import OperatorState, SegmentRef
from firnline.state.segments import Segment, open_segment
from firnline.storage import fsync_path
from firnline.types import Json

FORMAT = 1
_PREFIX = "firnline."
_EMPTY = Layout(pa.schema([]), pa.schema([]))


class Counted(NamedTuple):
    """The number of live keys, and how many of them have a timer."""

    keys: int
    timers: int


# --- plain rows ------------------------------------------------------------------------------------------


def flat_schema(layout: Layout) -> pa.Schema:
    """Return the columns of plain rows."""
    fields = [*layout.key, pa.field(TIMER, pa.int64())]
    taken = {field.name for field in fields}
    fields += [f.with_name(f"state.{f.name}") if f.name in taken else f for f in layout.state]
    return pa.schema(fields)


def _flat(layout: Layout, keys: pa.Table, timers: Any, state: pa.Table) -> pa.Table:
    return pa.Table.from_arrays([*keys.columns, timers, *state.columns], schema=flat_schema(layout))


def fit_column(column: pa.ChunkedArray, wanted: pa.Field, what: str) -> pa.ChunkedArray:
    """Return a column in the wanted type, if every value has an equal one in it.

    Raises:
        ConfigError: it is of another kind, or a value does not fit.
    """
    found = column.type.value_type if pa.types.is_dictionary(column.type) else column.type
    both_times = pa.types.is_timestamp(found) and pa.types.is_timestamp(wanted.type) and found.tz == wanted.type.tz
    if not (both_times or can_widen(found, wanted.type) or can_widen(wanted.type, found)):
        raise ConfigError(
            f"column {wanted.name!r} of {what} is {found}, not {wanted.type}",
            hint="Rows of state have the columns and types that `firnline state --export` writes.",
            column=wanted.name,
        )
    try:
        return column.cast(wanted.type)
    except pa.ArrowInvalid as error:
        raise ConfigError(
            f"column {wanted.name!r} of {what} does not fit {wanted.type}: {error}", column=wanted.name
        ) from error


# --- reading ---------------------------------------------------------------------------------------------


class StateReader:
    """The state of one operator, open for reading. Files are opened and verified on first use.

    Writes nothing: a file that one home lacks is read from the next one.

    Args:
        homes: The homes of its files, the first choice first.
        state: The files.
        key_groups: The number of key groups of the pipeline.
        deciding: How many columns of the key select the shard; None if unknown.
    """

    def __init__(self, homes: Sequence[StateHome], state: OperatorState, key_groups: int, deciding: int | None) -> None:
        self._homes = [replace(home, fallback=None) for home in homes]
        self._state = state
        self._key_groups = key_groups
        self.deciding = deciding
        self._segments: dict[int, list[Segment]] = {}

    @property
    def state(self) -> OperatorState:
        return self._state

    @property
    def files(self) -> dict[str, SegmentRef]:
        """Return every file by path."""
        return {file.path: file for _, _, shard in self._state.shards for file in shard.files}

    @cached_property
    def layout(self) -> Layout:
        """The columns of the newest segment; none before the first write."""
        refs = [ref for _, _, shard in self._state.shards for ref in shard.segments]
        return self._open(max(refs, key=lambda ref: ref.epoch)).layout if refs else _EMPTY

    @property
    def schema(self) -> pa.Schema:
        """The columns of plain rows."""
        return flat_schema(self.layout)

    def _open(self, ref: SegmentRef) -> Segment:
        problem: StateDamagedError | None = None
        for home in self._homes:
            try:
                return open_segment(home, ref)
            except StateDamagedError as error:
                problem = problem or error
        assert problem is not None
        raise problem

    def _shard(self, number: int) -> list[Segment]:
        if number not in self._segments:
            self._segments[number] = [self._open(ref) for ref in self._state.shards[number][2].segments]
        return self._segments[number]

    @property
    def _ranges(self) -> list[tuple[int, int]]:
        return [(first, last) for first, last, _ in self._state.shards]

    # -- all of it ------------------------------------------------------------------------------------

    def scan(self, rows: int = SCAN_ROWS) -> Iterator[pa.Table]:
        """Yield all live rows, about `rows` at a time; shard by shard, in the order of key groups."""
        for number, groups in enumerate(self._ranges):
            yield from self._scan_groups(number, groups, rows)

    def _scan_groups(self, shard: int, groups: tuple[int, int], rows: int) -> Iterator[pa.Table]:
        layout = self.layout
        for table in combined(self._shard(shard), groups, layout, keep_removed=False, rows=rows):
            yield _flat(layout, layout.keys_of(table), layout.timers_of(table), layout.state_of(table))

    def first(self, rows: int) -> pa.Table:
        """Return the first rows of a scan."""
        parts, left = [self.schema.empty_table()], rows
        for table in self.scan(max(rows, 1)):
            parts.append(table.slice(0, left))
            left -= parts[-1].num_rows
            if left <= 0:
                break
        return pa.concat_tables(parts).combine_chunks()

    def count(self) -> Counted:
        """Count the live keys, without reading the columns of the state."""
        small = Layout(self.layout.key, pa.schema([]), self.layout.timers)
        keys = timers = 0
        for number, groups in enumerate(self._ranges):
            for table in combined(self._shard(number), groups, small, keep_removed=False):
                keys += table.num_rows
                timers += table.num_rows - small.timers_of(table).null_count
        return Counted(keys, timers)

    # -- some keys ------------------------------------------------------------------------------------

    def find(self, keys: pa.Table) -> pa.Table:
        """Return the rows of those of the given keys that have state; keys are found by their slots.

        `keys` has all columns of the key, or only those that select the shard. In the second case every key that starts
        with them matches (all windows of a key), and their key group is read.

        Raises:
            ConfigError: it has other columns, or a value that does not fit the column's type.
        """
        names = self.layout.key.names
        if not names:
            return self.schema.empty_table()
        deciding = self.deciding
        if deciding is None:
            raise ConfigError(
                "the spec no longer has this operator, so its keys cannot be looked up", hint="Use a query: --sql"
            )
        wanted = set(keys.column_names)
        if wanted == set(names):
            return self._find_whole(self._keys(keys, names), deciding)
        if wanted == set(names[:deciding]):
            return self._find_beginning(self._keys(keys, names[:deciding]), deciding)
        raise ConfigError(
            f"the key has the columns {', '.join(names)}, not {', '.join(keys.column_names) or 'none'}",
            hint=f"Give a value for each of them, or for {', '.join(names[:deciding]) or 'none of them'} alone.",
        )

    def _keys(self, keys: pa.Table, names: Sequence[str]) -> pa.Table:
        fields = [self.layout.key.field(name) for name in names]
        columns = [fit_column(keys.column(field.name), field, "the keys") for field in fields]
        return pa.Table.from_arrays(columns, names=list(names)).combine_chunks()

    def _find_whole(self, keys: pa.Table, deciding: int) -> pa.Table:
        at = locate(keys, deciding, self._key_groups)
        shards = shard_of(at.groups, self._ranges)
        parts, places = [self.schema.empty_table()], [np.empty(0, np.int64)]
        for shard in np.unique(shards):
            asked = np.flatnonzero(shards == shard)
            asked = asked[np.argsort(at.slots[asked], kind="stable")]
            found = lookup(self._shard(int(shard)), at.slots[asked], at.keys.take(asked), self.layout)
            there = pa.array(np.flatnonzero(found.exists))
            asked = asked[found.exists]
            state = found.state.take(there)
            parts.append(_flat(self.layout, keys.take(pa.array(asked)), found.timers.take(there), state))
            places.append(asked)
        order = np.argsort(np.concatenate(places), kind="stable")
        return pa.concat_tables(parts).combine_chunks().take(pa.array(order))

    def _find_beginning(self, keys: pa.Table, deciding: int) -> pa.Table:
        wanted = encode_keys(keys)
        groups = key_groups_of(wanted, self._key_groups)
        parts = [self.schema.empty_table()]
        for group in np.unique(groups).tolist():
            asked = wanted.take(np.flatnonzero(groups == group))
            shard = int(shard_of(np.array([group], np.uint16), self._ranges)[0])
            for table in self._scan_groups(shard, (group, group + 1), SCAN_ROWS):
                there = encode_keys(table.select(range(deciding)), table.num_rows)
                parts.append(table.filter(pa.array(_among(there, asked))))
        return pa.concat_tables(parts).combine_chunks()


def _among(keys: EncodedKeys, wanted: EncodedKeys) -> Any:
    """Return which keys are among the wanted ones."""
    known = {wanted[n] for n in range(len(wanted))}
    hit = np.isin(keys.hash64(), wanted.hash64())
    hit[hit] = [keys[int(n)] in known for n in np.flatnonzero(hit)]
    return hit


# --- writing ---------------------------------------------------------------------------------------------


def write_export(path: str, schema: pa.Schema, tables: Iterable[pa.Table], about: Mapping[str, Json]) -> int:
    """Write rows to a new Parquet file, durably and atomically. Returns how many.

    Raises:
        ConfigError: the file already exists.
    """
    folder = os.path.dirname(os.path.abspath(path))
    if os.path.lexists(path) or not os.path.isdir(folder):
        problem = "is there already" if os.path.lexists(path) else f"cannot be written: there is no folder {folder}"
        raise ConfigError(f"{path} {problem}", hint="Name another file in a folder that is there.")
    facts = {_PREFIX + name: str(value) for name, value in {"format": FORMAT, **about}.items()}
    temporary = temporary_beside(path, uuid.uuid4().hex)
    rows = 0
    fault_point("state.export.before")
    try:
        with pq.ParquetWriter(temporary, schema.with_metadata(facts), compression="zstd") as writer:
            for table in tables:
                writer.write_table(table.replace_schema_metadata(facts))
                rows += table.num_rows
        fsync_path(temporary)
        fault_point("state.export.publish.before")
        os.link(temporary, path)  # unlike rename, this refuses to replace
        os.unlink(temporary)
    except FileExistsError as error:
        os.unlink(temporary)
        raise ConfigError(f"{path} is there already", hint="Name another file in a folder that is there.") from error
    except BaseException:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(temporary)
        raise
    fault_point("state.export.publish.after")
    fsync_path(folder)
    fault_point("state.export.after")
    return rows


VIEW = "state"
# A query sees only the view: no files, no network, no variables of this process, and it cannot enable more.
_SETTINGS = (
    "SET TimeZone = 'UTC'",
    "SET python_enable_replacements = false",
    "SET enable_external_access = false",
)
_LOCK = "SET lock_configuration = true"


@dataclass(frozen=True, slots=True)
class Answer:
    """The first rows of a query's result, with unique column names. `more`: there are others."""

    columns: list[str]
    rows: list[tuple[Any, ...]]
    more: bool


class _Stream:
    """The state as Arrow streams, a new one for each request: a query may read the view several times."""

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
        except (FirnlineError, OSError) as error:  # DuckDB would hide it in an error of its own
            self.error = error
            raise


def query_state(reader: StateReader, sql: str, limit: int) -> Answer:
    """Return the first `limit` rows of a query over the view `state`.

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
    """Number repeated names: `n`, `n_1`."""
    taken: list[str] = []
    for name in names:
        free = (f"{name}_{number}" for number in count(1))
        taken.append(name if name not in taken else next(other for other in free if other not in taken))
    return taken
