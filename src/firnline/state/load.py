"""Writes plain rows of state, as `exporting` gives them, as segments and timers of the shards that own their keys."""

from __future__ import annotations

import hashlib
from typing import Protocol

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from firnline.errors import ConfigError, NewerFormatError
from firnline.state.columns import TIMER, Layout
from firnline.state.export import FORMAT, fit_column, flat_schema
from firnline.state.home import StateHome
from firnline.state.keys import Located, distinct, locate, shard_of
from firnline.state.manifest import Ranges
from firnline.state.refs import OperatorState, ShardState
from firnline.state.segments import write_segment
from firnline.state.timers import write_timers

EMPTY = "empty"  # as `initial_state`: begin with nothing
_FORMAT = b"firnline.format"
_HINT = "`firnline state OPERATOR --export PATH` writes such a file."


class Keyed(Protocol):
    """What is asked of an operator here."""

    name: str

    @property
    def keys(self) -> tuple[str, ...]: ...

    @property
    def state_key(self) -> pa.Schema: ...

    @property
    def state_schema(self) -> pa.Schema: ...


def read_export(path: str) -> pa.Table:
    """Read the rows of an exported state.

    Raises:
        ConfigError: it is not there, or no Parquet file.
        NewerFormatError: a newer Firnline wrote it.
    """
    try:
        table = pq.read_table(path, memory_map=True, partitioning=None)
    except FileNotFoundError as error:
        raise ConfigError(f"there is no exported state at {path}", hint=_HINT) from error
    except (pa.ArrowInvalid, OSError) as error:
        raise ConfigError(f"{path} cannot be read as an exported state: {error}", hint=_HINT) from error
    found = (table.schema.metadata or {}).get(_FORMAT, b"")
    if found.isdigit() and int(found) > FORMAT:
        raise NewerFormatError(f"{path} has format {int(found)}; this Firnline reads up to {FORMAT}", found=int(found))
    return table


def export_digest(path: str) -> str:
    """The SHA-256 of an exported state; empty when there is none at this path."""
    try:
        with open(path, "rb") as stream:
            return hashlib.file_digest(stream, "sha256").hexdigest()
    except OSError:
        return ""


def load_initial_state(
    operator: Keyed,
    path: str,
    home: StateHome,
    checkpoint: str,
    ranges: Ranges,
    key_groups: int,
    epoch: int,
) -> OperatorState:
    """The state that an operator without one begins with: the rows of an exported state, written for its shards.

    Args:
        operator: Whose state it becomes: its key and state columns are required of the file.
        path: What `initial_state` says; `empty` gives empty state.
        home: Where its files go.
        checkpoint: The id whose folder they go into: that of the epoch and attempt that begins with them.
        ranges: The key groups of each shard.
        key_groups: How many there are.
        epoch: The epoch that begins with it.

    Raises:
        ConfigError: the file is missing, or its columns are not the operator's.
    """
    if path == EMPTY:
        return OperatorState(0)
    layout = Layout(operator.state_key, operator.state_schema, timers=True)
    return import_rows(
        home, checkpoint, read_export(path), layout, ranges, key_groups, len(operator.keys), operator.name, epoch
    )


def import_rows(
    home: StateHome,
    folder_prefix: str,
    table: pa.Table,
    layout: Layout,
    ranges: Ranges,
    key_groups: int,
    deciding: int,
    operator: str,
    epoch: int,
) -> OperatorState:
    """Write rows as one segment, and one file of timers, per shard that owns some of them; durable on return.

    Args:
        home: Where the files go.
        folder_prefix: The folder of the shards' folders in it: the id of a checkpoint.
        table: Plain rows, every key once; `_timer` may be missing.
        layout: The columns that are required of them.
        ranges: The key groups of each shard.
        key_groups: How many there are.
        deciding: How many columns of the key decide the shard.
        operator: Whose state it is.
        epoch: The epoch that writes it.

    Raises:
        ConfigError: columns are missing, too many or of another type, or a key stands there twice.
    """
    layout = Layout(layout.key, layout.state, timers=True)
    rows, at = locate_rows(table, layout, key_groups, deciding, operator)
    owners = shard_of(at.groups, ranges)
    shards = []
    for number, (first, last) in enumerate(ranges):
        own = np.flatnonzero(owners == number)
        state = ShardState()
        if own.size:
            prefix = f"{folder_prefix}/shard_{number}/{operator}.import"
            state = _write(home, prefix, rows.take(pa.array(own)), at.slots[own], layout, operator, epoch)
        shards.append((first, last, state))
    return OperatorState(epoch, tuple(shards))


def _write(
    home: StateHome, prefix: str, rows: pa.Table, slots: np.ndarray, layout: Layout, operator: str, epoch: int
) -> ShardState:
    count = len(layout.key)
    due = rows.column(count).combine_chunks()
    keys, state = rows.select(list(range(count))), rows.select(list(range(count + 1, rows.num_columns)))
    table = layout.table(slots, keys, state, timers=due)
    segment = write_segment(home.storage, prefix, table, layout, operator=operator, epoch=epoch)
    timed = np.asarray(due.is_valid())
    times = np.asarray(due.drop_null(), dtype=np.int64)
    timers = write_timers(home.storage, prefix, times, slots[timed], operator=operator, epoch=epoch)
    return ShardState((segment,), () if timers is None else (timers,))


def locate_rows(
    table: pa.Table, layout: Layout, key_groups: int, deciding: int, operator: str
) -> tuple[pa.Table, Located]:
    """Check rows as `import_rows` does, and find out where they belong; writes nothing."""
    rows = _fit(table, layout, operator)
    keys = rows.select(list(range(len(layout.key))))
    at = locate(keys, deciding, key_groups, rows.num_rows)
    _check_once(at, keys, operator)
    return rows, at


def _fit(table: pa.Table, layout: Layout, operator: str) -> pa.Table:
    """The rows with exactly the columns of the layout, in its order."""
    wanted, what = flat_schema(layout), f"the rows for {operator!r}"
    names = table.column_names
    missing = [name for name in wanted.names if name not in names and name != TIMER]
    extra = [name for name in names if name not in wanted.names]
    if missing or extra or len(set(names)) < len(names):
        told = [f"lack {', '.join(missing)}"] * bool(missing) + [f"have {', '.join(extra)}"] * bool(extra)
        raise ConfigError(
            f"{what} have other columns than its state: they {' and '.join(told) or 'have a column twice'}",
            hint=f"Its state has: {', '.join(wanted.names)} ({TIMER} may be missing).",
            missing=missing,
            extra=extra,
        )
    columns = []
    for field in wanted:
        if field.name in names:
            columns.append(fit_column(table.column(field.name), field, what))
        else:
            columns.append(pa.nulls(table.num_rows, field.type))
    return pa.Table.from_arrays(columns, schema=wanted).combine_chunks()


def _check_once(at: Located, keys: pa.Table, operator: str) -> None:
    once = distinct(at.slots, at.keys)
    if once.rows.size == len(at.keys):
        return
    twice = int(np.flatnonzero(np.bincount(once.key_of) > 1)[0])
    raise ConfigError(
        f"the rows for {operator!r} have the key {keys.slice(int(once.rows[twice]), 1).to_pylist()[0]} more than once",
        hint="Give every key once.",
    )


def add_state(before: OperatorState, added: OperatorState) -> OperatorState:
    """State with other state on top of it, which overrides its keys; both are dealt out alike."""
    pairs = zip(before.shards, added.shards, strict=True)
    shards = tuple(
        (first, last, ShardState((*old.segments, *new.segments), (*old.timers, *new.timers)))
        for (first, last, old), (_, _, new) in pairs
    )
    return OperatorState(added.epoch, shards)
