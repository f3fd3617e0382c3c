"""Rewrites the rows of several files of one partition as one file, complete and durable before anything names it."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import pyarrow as pa
import pyarrow.dataset as pads

from firnline.errors import ConfigError, SinkError
from firnline.sinks.delta.contents import find_removable, special_features
from firnline.sinks.delta.stage import ParquetStager
from firnline.sinks.delta.table import Table
from firnline.storage import Storage
from firnline.types import Json

SMALL = 0.75  # of the target: a file above this stays as it is
BATCH_ROWS = 65_536
PartitionFilter = tuple[str, str, Any]  # column, operator, value or values

_OPERATORS: dict[str, Callable[[Any, Any], bool]] = {
    "=": operator.eq,
    "!=": operator.ne,
    "<": operator.lt,
    "<=": operator.le,
    ">": operator.gt,
    ">=": operator.ge,
    "in": lambda value, wanted: value in wanted,
    "not in": lambda value, wanted: value not in wanted,
}


@dataclass(frozen=True, slots=True)
class OldFile:
    """One file of the version that was read. `path` is in the form for delta-rs, which encodes it again for the log."""

    path: str
    size_bytes: int
    rows: int | None
    partition: tuple[Any, ...]


@dataclass(frozen=True, slots=True)
class Bin:
    """Small files of one partition that become one."""

    files: tuple[OldFile, ...]

    @property
    def size_bytes(self) -> int:
        return sum(f.size_bytes for f in self.files)


def check_supported(table: Table) -> None:
    """Refuse tables whose files hold more than rows."""
    used = special_features(table.delta)
    if used:
        raise ConfigError(
            f"{table.uri} uses {', '.join(used)}, under which Firnline does not rewrite files",
            hint="Compact it with OPTIMIZE of the engine that wrote it.",
        )


def plan(table: Table, target_bytes: int, filters: Iterable[PartitionFilter]) -> tuple[list[Bin], int]:
    """Return bins of small files, in the order of writing, and how many files cannot be named safely."""
    by_partition: dict[tuple[Any, ...], list[OldFile]] = {}
    unsafe = 0
    for file in _files(table, list(filters)):
        if file.size_bytes >= target_bytes * SMALL:
            continue
        if file.path == "":
            unsafe += 1
        else:
            by_partition.setdefault(file.partition, []).append(file)
    bins = [b for files in by_partition.values() for b in _pack(files, target_bytes)]
    return bins, unsafe


def _pack(files: list[OldFile], target_bytes: int) -> Iterator[Bin]:
    held: list[OldFile] = []
    size = 0
    for file in files:
        if held and size + file.size_bytes > target_bytes:
            if len(held) > 1:
                yield Bin(tuple(held))
            held, size = [], 0
        held.append(file)
        size += file.size_bytes
    if len(held) > 1:
        yield Bin(tuple(held))


def _files(table: Table, filters: list[PartitionFilter]) -> Iterator[OldFile]:
    columns = table.partition_columns()
    tests = [_test(table, columns, one) for one in filters]
    actions = pa.table(table.delta.get_add_actions())
    wanted = ["path", "size_bytes", "num_records", "modification_time", *(["partition"] if columns else [])]
    actions = actions.select(wanted).sort_by([("modification_time", "ascending"), ("path", "ascending")])
    for batch in actions.to_batches(max_chunksize=BATCH_ROWS):
        for row in batch.to_pylist():
            values = tuple(row["partition"][c] for c in columns) if columns else ()
            if all(test(values) for test in tests):
                path = find_removable(row["path"]) or ""
                yield OldFile(path, int(row["size_bytes"]), row["num_records"], values)


def _test(table: Table, columns: list[str], wanted: PartitionFilter) -> Callable[[tuple[Any, ...]], bool]:
    column, sign, value = wanted
    if column not in columns:
        raise ConfigError(f"{column!r} is no partition column", hint=f"The table is partitioned by {columns}.")
    if sign not in _OPERATORS:
        raise ConfigError(f"{sign!r} is no operator", hint=f"Use one of {', '.join(_OPERATORS)}.")
    kind, position = table.schema().field(column).type, columns.index(column)

    def typed(one: Any) -> Any:
        try:
            return pa.scalar(one).cast(kind).as_py() if one is not None else None
        except pa.ArrowException as error:
            raise ConfigError(f"{one!r} is no value of {column} ({kind})") from error

    if sign.endswith("in"):
        target: Any = [typed(one) for one in value]
    else:
        target = typed(value)

    def test(values: tuple[Any, ...]) -> bool:
        found = values[position]
        if found is None and sign not in ("=", "!=", "in", "not in"):
            return False
        return _OPERATORS[sign](found, target)

    return test


class Rewriter:
    """Reads files with the table's current columns and stages them again."""

    def __init__(self, table: Table, storage: Storage, options: dict[str, str], target_mb: int) -> None:
        self._storage = storage
        self._options = options
        self._target_mb = target_mb
        self._partitions = table.partition_columns()
        self._schema = table.schema()
        self._format = pads.ParquetFileFormat()

    def rewrite(self, chosen: Bin, attempt: str) -> list[dict[str, Json]]:
        """Stage the rows of a bin under an attempt. Returns the staged file, durable.

        Raises:
            SinkError: a file cannot be read, or its row count differs from the log; nothing is left behind.
        """
        target = {
            "table": self._storage.root,
            "storage_options": self._options,
            "partition_by": self._partitions,
            "file_size_mb": 2 * self._target_mb,  # one file per bin, also when it packs worse than its parts
        }
        stager = ParquetStager(target, attempt, self._storage)
        try:
            read = 0
            for file in chosen.files:
                rows = 0
                for batch in self._read(file):
                    stager.write(batch)
                    rows += batch.num_rows
                if file.rows is not None and rows != file.rows:
                    raise SinkError(f"{file.path} holds {rows} rows, the log says {file.rows}")
                read += rows
            staged = stager.close()
            if sum(int(f["rows"]) for f in staged) != read:
                raise SinkError(f"rewriting {len(chosen.files)} files lost rows; nothing was committed")
        except (pa.ArrowException, OSError) as error:
            stager.discard()
            raise SinkError(f"cannot rewrite files of {self._storage.root}: {error}") from error
        except BaseException:
            stager.discard()
            raise
        return staged

    def _read(self, file: OldFile) -> Iterator[pa.RecordBatch]:
        """Yield the rows of one file, with missing columns as nulls and its partition values as columns."""
        data = pa.schema([f for f in self._schema if f.name not in self._partitions])
        fragment = self._format.make_fragment(pa.BufferReader(self._storage.get(file.path)))  # a small file, by choice
        values = dict(zip(self._partitions, file.partition, strict=True))
        for batch in fragment.to_batches(schema=data, batch_size=BATCH_ROWS):
            if not batch.num_rows:
                continue
            columns = [
                pa.repeat(pa.scalar(values[f.name], f.type), batch.num_rows)
                if f.name in values
                else batch.column(f.name)
                for f in self._schema
            ]
            yield pa.RecordBatch.from_arrays(columns, schema=pa.schema([f.with_nullable(True) for f in self._schema]))
