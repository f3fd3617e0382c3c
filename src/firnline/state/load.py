"""Writes plain rows of state, in the form of an export, as segments and timers of the shards that own their keys."""

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
from firnline.state.manifest import OperatorState, Ranges, ShardState
from firnline.state.segments import write_segment
from firnline.state.timers import write_timers

EMPTY = "empty"  # value of `initial_state`: start empty
_FORMAT = b"firnline.format"
_HINT = "`firnline state OPERATOR --export PATH` writes such a file."


class Keyed(Protocol):
    """The part of an operator that this module uses."""

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
        ConfigError: it is missing, or no Parquet file.
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
    """Return the SHA-256 of an exported state; empty if there is none at this path."""
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
    """Return the first state of an operator: the rows of an exported state, written for its shards.

    Args:
        operator: The operator, whose key and state columns the file must have.
        path: The value of `initial_state`; `empty` gives empty state.
        home: The home for its files.
        checkpoint: The id that names their folder: that of the epoch and attempt that starts with them.
        ranges: The key groups of each shard.
        key_groups: The number of key groups.
        epoch: The epoch that starts with it.

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
    """Write rows as one segment and one timer file per owning shard; durable on return.

    Args:
        home: The home for the files.
        folder_prefix: The parent of the shards' folders in it: the id of a checkpoint.
        table: Plain rows, every key once; `_timer` is optional.
        layout: The columns that they must have.
        ranges: The key groups of each shard.
        key_groups: The number of key groups.
        deciding: How many columns of the key select the shard.
        operator: The owner of the state.
        epoch: The epoch that writes it.

    Raises:
        ConfigError: columns are missing, unknown or of another type, or a key is duplicate.
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
    """Check rows like `import_rows`, and return their location. Writes nothing."""
    rows = _fit(table, layout, operator)
    keys = rows.select(list(range(len(layout.key))))
    at = locate(keys, deciding, key_groups, rows.num_rows)
    _check_once(at, keys, operator)
    return rows, at


def _fit(table: pa.Table, layout: Layout, operator: str) -> pa.Table:
    """Return the rows with exactly the columns of the layout, in its order."""
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
    """Return state with other state on top, which overrides its keys; both have the same shards."""
    pairs = zip(before.shards, added.shards, strict=True)
    shards = tuple(
        (first, last, ShardState((*old.segments, *new.segments), (*old.timers, *new.timers)))
        for (first, last, old), (_, _, new) in pairs
    )
    return OperatorState(added.epoch, shards)
