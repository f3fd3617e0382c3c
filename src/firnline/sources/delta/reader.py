"""Reads parts of data files in a worker: rows with the table's columns, in bounded memory.

Values that are not in a file (partition columns, columns that the file is older than) come from the log. Then the rows
are fitted to the columns of the port, like those of any Parquet file.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import pyarrow as pa
import pyarrow.compute as pc

from firnline.errors import BadRecordsError, SchemaError, SourceError, SourceGapError
from firnline.ndjson import BrokenFileError, Decoded, MismatchError, UnexpectedFieldError
from firnline.options import LINEAGE
from firnline.schema import RESCUED_COLUMN, is_column_name_ok
from firnline.sinks.delta.contents import find_key
from firnline.sources.base import MAIN_PORT, Budget, ReadColumns, Rows, Split, SplitEnd, SplitReader
from firnline.sources.columns import Columns
from firnline.sources.decoding import with_rescued
from firnline.sources.delta.versions import CHANGE_TYPE, COMMIT_TIMESTAMP, COMMIT_VERSION, NEW_ROWS, OLD_ROWS
from firnline.sources.files.formats.base import Place, StoredFile
from firnline.sources.files.formats.parquet import ParquetDecoder, ParquetFormat, ParquetPiece
from firnline.storage import open_storage
from firnline.types import Json

UPSTREAM = pa.schema(
    [
        pa.field("_firnline_upstream_version", pa.int64()),
        pa.field("_firnline_upstream_pipeline", pa.string()),
        pa.field("_firnline_upstream_epoch", pa.int64()),
    ]
)
_MICROS = pa.timestamp("us", "UTC")


@dataclass(frozen=True, slots=True)
class ReaderSettings:
    """What a reader needs beside its split."""

    root: str
    storage_options: dict[str, str]
    on_bad_record: str = "quarantine"
    lineage: bool = False

    def to_json(self) -> dict[str, Json]:
        """Return plain JSON for the workers."""
        return {
            "root": self.root,
            "storage_options": self.storage_options,
            "on_bad_record": self.on_bad_record,
            "lineage": self.lineage,
        }


@dataclass(frozen=True, slots=True)
class _Kept:
    """Columns that pass unchanged, since no record may name them: lineage and rescued values of the table's writer."""

    columns: dict[str, pa.Array]
    rescued: pa.Array | None


class DeltaReader(SplitReader):
    """Reads the parts of files of one split, one after the other."""

    def __init__(self, settings: dict[str, Json], split: Split, ports: Mapping[str, Columns]) -> None:
        self._settings = ReaderSettings(**settings)
        self._split = split
        self._columns = ports[MAIN_PORT]
        self._storage = open_storage(self._settings.root, self._settings.storage_options)

    def read(self, schemas: Mapping[str, pa.Schema], budget: Budget) -> Iterator[Sequence[Rows]]:
        known = schemas[MAIN_PORT]
        self._own = pa.schema([f for f in known if not is_column_name_ok(f.name) and f.name != RESCUED_COLUMN])
        decoded = [f for f in known if is_column_name_ok(f.name) or f.name == RESCUED_COLUMN]
        self._decoder = ParquetDecoder(pa.schema(decoded, metadata=known.metadata), self._columns)
        self._outcomes: list[Json] = []
        schema: Json = None
        for item in self._split.inputs:
            if budget.is_full:
                break
            schema = item.get("schema", schema)
            yield from self._read_part(item, _table_columns(schema["columns"]), schema["partition_by"], budget)

    def end(self) -> SplitEnd:
        columns = pa.schema([*self._decoder.schema, *self._own])
        return SplitEnd(self._outcomes, {MAIN_PORT: ReadColumns(columns)})

    def _read_part(
        self, item: dict[str, Json], table: pa.Schema, partition_by: Sequence[str], budget: Budget
    ) -> Iterator[Sequence[Rows]]:
        to, path = int(item["from"]), str(item["path"])
        found = find_key(self._storage, path)
        if found is None:
            raise self._gone(item, "it does not exist any more: it was vacuumed")
        key, size_bytes = found
        constants = _constants(item, table, partition_by)
        file = StoredFile(self._storage, key, path, size_bytes)
        finished = False
        try:
            # Some rows of a change file are not wanted: another place in it may follow while the budget is not full.
            while not finished and not budget.is_full:
                most = budget.records_left if "to" not in item else min(budget.records_left, int(item["to"]) - to)
                reader, consumed = ParquetFormat().open(file, Place(record=to, max_records=most)), 0
                for piece in reader:
                    rows = self._rows(item, f"{self._settings.root}/{key}", piece, table, constants)
                    budget.records += rows.batch.num_rows + len(rows.bad)
                    budget.raw_bytes += piece.size_bytes
                    budget.bytes_read += piece.consumed_bytes - consumed
                    consumed = piece.consumed_bytes
                    to = reader.records_read
                    yield [rows]
                    if budget.is_full:
                        break
                finished = to >= int(item["to"]) if "to" in item else reader.finished
                if not finished and reader.finished:
                    raise BrokenFileError(path, f"has {to} rows, and the log says {item['to']}")
        except BrokenFileError as error:
            raise self._gone(item, error.reason) from error
        except OSError as error:
            raise SourceError(f"cannot read {self._settings.root}/{key}: {error}", file=path) from error
        finally:
            file.close()
        self._outcomes.append({"part": item["part"], "to": to, "finished": finished})

    def _rows(
        self,
        item: dict[str, Json],
        origin: str,
        piece: ParquetPiece,
        table: pa.Schema,
        constants: Mapping[str, pa.Scalar],
    ) -> Rows:
        batch, chosen = _choose_rows(piece.batch, item.get("change"))
        batch, kept = self._with_table_columns(item, batch, table, constants)
        decoded = self._decode(item, ParquetPiece(batch, piece.first_record, piece.consumed_bytes))
        places = pc.subtract(decoded.record_numbers, piece.first_record)
        if kept.columns or kept.rescued is not None:
            decoded = self._with_kept(decoded, kept, places)
        numbers = decoded.record_numbers if chosen is None else pc.add(chosen.take(places), piece.first_record)
        rescued = [replace(one, file=origin) for one in decoded.rescued]
        return Rows(origin, decoded.batch, numbers, decoded.bad, rescued=rescued)

    def _with_table_columns(
        self, item: dict[str, Json], batch: pa.RecordBatch, table: pa.Schema, constants: Mapping[str, pa.Scalar]
    ) -> tuple[pa.RecordBatch, _Kept]:
        """Return a batch with the columns of the table, and apart from it those that pass unchanged."""
        columns: dict[str, pa.Array] = {}
        kept: dict[str, pa.Array] = {}
        names = batch.schema.names
        lineage = self._settings.lineage
        for field in table:
            if lineage and field.name in (*LINEAGE, *UPSTREAM.names):
                continue  # a row names the row that it was made from; that one names its own origin
            if field.name in constants:
                values = pa.repeat(constants[field.name], batch.num_rows)
            elif field.name in names:
                values = _cast(batch.column(names.index(field.name)), field.type)
            else:
                values = pa.nulls(batch.num_rows, field.type)
            (columns if is_column_name_ok(field.name) else kept)[field.name] = values
        for name in (CHANGE_TYPE, COMMIT_VERSION, COMMIT_TIMESTAMP):
            if name in constants:
                columns[name] = pa.repeat(constants[name], batch.num_rows)
            elif name == CHANGE_TYPE and item.get("change") in ("old", "new"):
                columns[name] = batch.column(names.index(name))
        if lineage:
            values = (item.get("added", item["version"]), item.get("upstream_pipeline"), item.get("upstream_epoch"))
            for field, value in zip(UPSTREAM, values, strict=True):
                kept[field.name] = pa.repeat(pa.scalar(value, field.type), batch.num_rows)
        rescued = kept.pop(RESCUED_COLUMN, None)
        fields = [pa.field(name, values.type) for name, values in columns.items()]
        if not fields:
            empty = pa.RecordBatch.from_struct_array(pa.repeat(pa.scalar({}, pa.struct([])), batch.num_rows))
            return empty, _Kept(kept, rescued)
        made = pa.RecordBatch.from_arrays(list(columns.values()), schema=pa.schema(fields))
        return made, _Kept(kept, rescued)

    def _decode(self, item: dict[str, Json], piece: ParquetPiece) -> Decoded:
        try:
            decoded = self._decoder.decode(piece)
        except (UnexpectedFieldError, MismatchError) as error:
            raise SchemaError(f"{item['path']}: {error}", file=item["path"]) from error
        if decoded.bad and self._settings.on_bad_record == "fail":
            first = decoded.bad[0]
            raise BadRecordsError(f"{item['path']}, row {first.record}: {first.reason}", file=item["path"])
        return decoded

    def _with_kept(self, decoded: Decoded, kept: _Kept, places: pa.Array) -> Decoded:
        """Add the columns that pass unchanged to decoded rows, which stood at these places."""
        batch = decoded.batch
        for name, values in kept.columns.items():
            index = self._own.get_field_index(name)
            if index < 0:
                self._own = self._own.append(pa.field(name, values.type))
                index = len(self._own) - 1
            batch = batch.append_column(self._own.field(index), _cast(values.take(places), self._own.field(index).type))
        if kept.rescued is not None:
            batch = with_rescued(self._decoder, batch, kept.rescued.cast(pa.string()).take(places))
        return replace(decoded, batch=batch)

    def _gone(self, item: dict[str, Json], reason: str) -> SourceGapError:
        version = item.get("added", item["version"])
        return SourceGapError(
            f"version {version} of {self._settings.root} cannot be read: {item['path']}: {reason}",
            hint="Restore the file from a backup. Without it, read on behind the gap, with `start: "
            f"{int(item['version']) + 1}` in a pipeline of another name. Vacuum deletes files that the table removed "
            "longer ago than delta.deletedFileRetentionDuration: it must be longer than a reader may lag.",
            file=item["path"],
            version=version,
        )


def _choose_rows(batch: pa.RecordBatch, change: Json) -> tuple[pa.RecordBatch, pa.Array | None]:
    """Return the old or the new rows of a change file, with their places; any other file is read whole."""
    if change not in ("old", "new"):
        return batch, None
    wanted = pa.array(OLD_ROWS if change == "old" else NEW_ROWS)
    mask = pc.is_in(batch.column(batch.schema.names.index(CHANGE_TYPE)).cast(pa.string()), wanted)
    places = pc.indices_nonzero(mask).cast(pa.int64())
    return batch.take(places), places


def _constants(item: dict[str, Json], table: pa.Schema, partition_by: Sequence[str]) -> dict[str, pa.Scalar]:
    """Return the values that all rows of a part of a file have, by column."""
    values = item.get("values") or {}
    found: dict[str, pa.Scalar] = {}
    for name in partition_by:
        if name not in values:
            raise SchemaError(
                f"{item['path']}: version {item['version']} does not tell its value of the partition column {name!r}",
                file=item["path"],
            )
        found[name] = partition_scalar(values[name], table.field(name).type, name)
    if "change" in item:
        if item["change"] in ("insert", "delete"):
            found[CHANGE_TYPE] = pa.scalar(str(item["change"]))
        found[COMMIT_VERSION] = pa.scalar(int(item["version"]), pa.int64())
        stamp = item.get("stamp_ms")
        found[COMMIT_TIMESTAMP] = pa.scalar(None if stamp is None else int(stamp) * 1000, _MICROS)
    return found


def partition_scalar(text: str | None, kind: pa.DataType, name: str) -> pa.Scalar:
    """Return the value of a partition column from its text in the log.

    Raises:
        SchemaError: it does not fit the column.
    """
    if text is None or text == "":  # Delta has no empty partition value
        return pa.scalar(None, kind)
    values = pa.array([text], pa.string())
    try:
        if pa.types.is_timestamp(kind):
            plain = text.replace("T", " ").removesuffix("Z")
            return pa.array([plain], pa.string()).cast(pa.timestamp("us")).cast(kind)[0]
        if pa.types.is_binary(kind) or pa.types.is_large_binary(kind):
            return pa.scalar(text.encode("latin-1"), kind)
        return values.cast(kind)[0]
    except (pa.ArrowException, UnicodeEncodeError) as error:
        raise SchemaError(f"the partition value {name}={text} is no {kind}: {error}") from error


@functools.lru_cache(maxsize=64)
def _table_columns(text: str) -> pa.Schema:
    from firnline.sources.delta.table_log import arrow_schema

    return arrow_schema(text)


def _cast(values: pa.Array, kind: pa.DataType) -> pa.Array:
    """Return values in the type of the table, if every one of them fits; nested values stay as they are."""
    if values.type.equals(kind) or pa.types.is_nested(kind) or pa.types.is_nested(values.type):
        return values
    try:
        return values.cast(kind)
    except pa.ArrowException:
        return values
