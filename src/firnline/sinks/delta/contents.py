"""The contents of one version of a table: data files, rows, partition values, columns."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol, TypeVar
from urllib.parse import quote, unquote

import pyarrow as pa
import pyarrow.compute as pc
from deltalake import DeltaTable

from firnline.errors import SchemaError
from firnline.options import LINEAGE
from firnline.schema import RESCUED_COLUMN, type_to_text, widen, wider_columns
from firnline.sinks.delta.stage import partition_text
from firnline.storage import Storage

logger = logging.getLogger(__name__)

BATCH_ROWS = 65_536
# What delta-rs does not encode in a path, beside letters and digits; a colon could begin a URI.
_NOT_ENCODED = "/!$&'()+,-.;=@_~"
# Table features under which the rows are those of the data files; under any other one they may not be.
_PLAIN_FEATURES = frozenset(
    {
        "appendOnly", "invariants", "checkConstraints", "changeDataFeed", "generatedColumns", "identityColumns",
        "timestampNtz", "v2Checkpoint", "vacuumProtocolCheck",
    }
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class ListedFile:
    """One file in the log. `path` is spelled as in the log, percent-encoded or not."""

    path: str
    size_bytes: int
    rows: int | None
    partition_values: dict[str, str | None]
    modification_time: int


class HasSize(Protocol):
    """A file of known size."""

    @property
    def size_bytes(self) -> int: ...


File = TypeVar("File", bound=HasSize)


def bundles(files: Iterable[File], most_bytes: int, most_files: int) -> Iterator[list[File]]:
    """Group files into tasks: large ones alone, small ones together."""
    bundle: list[File] = []
    size = 0
    for file in files:
        if bundle and (size + file.size_bytes > most_bytes or len(bundle) == most_files):
            yield bundle
            bundle, size = [], 0
        bundle.append(file)
        size += file.size_bytes
    if bundle:
        yield bundle


def list_contents(delta: DeltaTable) -> Iterator[ListedFile]:
    """Yield the files at the version of a handle. Reads the log, no data file."""
    names = list(delta.metadata().partition_columns)
    actions = pa.table(delta.get_add_actions())
    for batch in actions.to_batches(max_chunksize=BATCH_ROWS):
        values = {name: partition_text(pc.struct_field(batch.column("partition"), name)).to_pylist() for name in names}
        plain = batch.select(["path", "size_bytes", "num_records", "modification_time"]).to_pylist()
        for number, row in enumerate(plain):
            yield ListedFile(
                path=str(row["path"]),
                size_bytes=int(row["size_bytes"]),
                rows=row["num_records"],
                partition_values={name: values[name][number] for name in names},
                modification_time=int(row["modification_time"]),
            )


def special_features(delta: DeltaTable) -> list[str]:
    """Return the features under which files hold more, or less, than rows: deletion vectors, mapped columns."""
    protocol = delta.protocol()
    used = {*(protocol.reader_features or []), *(protocol.writer_features or [])} - _PLAIN_FEATURES
    if delta.metadata().configuration.get("delta.columnMapping.mode") not in (None, "none"):
        used.add("columnMapping")
    return sorted(used)


def find_removable(path: str) -> str | None:
    """Return the path for delta-rs whose Remove action names exactly this one in the log; None if unsure.

    delta-rs percent-encodes its input, and a Remove under another spelling removes nothing: the rows would exist twice.
    Only a path that delta-rs would spell the same way is therefore trusted.
    """
    try:
        plain = unquote(path, errors="strict")
    except UnicodeDecodeError:
        return None
    if quote(plain, safe=_NOT_ENCODED) != path or plain.startswith("/") or "//" in plain or ".." in plain.split("/"):
        return None
    return plain


def find_key(storage: Storage, path: str) -> tuple[str, int] | None:
    """Return the key and size of a file that the log names; None if it is not stored (any more)."""
    for key in dict.fromkeys((unquote(path), path)):
        with contextlib.suppress(FileNotFoundError):
            return key, storage.stat(key).size_bytes
    return None


def missing_fields(table: pa.Schema, wanted: pa.Schema) -> list[pa.Field]:
    """Return columns, or columns with nested fields, that must be added before files with `wanted` can be read.

    Raises:
        SchemaError: a column exists with another type.
    """
    found = []
    for field in wanted:
        index = table.get_field_index(field.name)
        if index < 0 or not _fits(table.field(index).type, field.type, field.name):
            found.append(field.with_nullable(True))
    return found


def as_in_table(wanted: pa.Schema, table: pa.Schema) -> pa.Schema:
    """Return the wanted columns with the table's types where those are narrower: the data's commit widens them."""
    return widen(wanted, {name: table.field(name).type for name in wider_columns(table, wanted)})


def changed_columns(table: pa.Schema, wanted: pa.Schema) -> dict[str, pa.DataType]:
    """Return the columns with a wider or narrower type in the data than in the table, with the type in the data."""
    narrower = {name: wanted.field(name).type for name in wider_columns(wanted, table)}
    return {**wider_columns(table, wanted), **narrower}


def log_added(uri: str, before: pa.Schema, added: Sequence[pa.Field], epoch: int | None) -> None:
    """Log the columns that were added to a table; the first ones are no reason for a warning."""
    level = logging.INFO if set(before.names) <= {RESCUED_COLUMN, *LINEAGE} else logging.WARNING
    facts = {"table": uri} if epoch is None else {"table": uri, "epoch": epoch}
    for field in added:
        what = "added column" if before.get_field_index(field.name) < 0 else "added fields to column"
        try:
            kind = type_to_text(field)
        except ValueError:  # from a foreign unit: a type that Firnline itself does not write
            kind = str(field.type)
        logger.log(level, "%s %s (%s)", what, field.name, kind, extra=facts)


def _fits(table: pa.DataType, wanted: pa.DataType, path: str) -> bool:
    """Return whether the table's type has every nested field of the wanted one. Raises SchemaError if the types
    differ."""
    if pa.types.is_struct(table) and pa.types.is_struct(wanted):
        types = {table.field(i).name: table.field(i).type for i in range(table.num_fields)}
        children = [wanted.field(i) for i in range(wanted.num_fields)]
        results = [c.name in types and _fits(types[c.name], c.type, f"{path}.{c.name}") for c in children]
        return all(results)
    if _is_list(table) and _is_list(wanted):
        return _fits(table.value_type, wanted.value_type, f"{path}[]")
    if pa.types.is_map(table) and pa.types.is_map(wanted):
        return _fits(table.item_type, wanted.item_type, f"{path}{{}}")
    if _plain(table) != _plain(wanted):
        raise SchemaError(f"column {path} is {table} in the table, but {wanted} in the data", column=path)
    return True


def _is_list(kind: pa.DataType) -> bool:
    return bool(pa.types.is_list(kind) or pa.types.is_large_list(kind))


def _plain(kind: pa.DataType) -> str:
    """Return a type without differences of memory layout alone."""
    if pa.types.is_large_string(kind) or pa.types.is_string_view(kind):
        return "string"
    if pa.types.is_large_binary(kind) or pa.types.is_binary_view(kind):
        return "binary"
    return str(kind)
