"""Values that are Avro records: each is decoded with the schema that its id names in the registry."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pyarrow as pa

from firnline.avro import Schema, UnsupportedSchemaError, decode_records, parse_schema
from firnline.ndjson import BadRecord, Decoded, MismatchError, UnexpectedFieldError
from firnline.rescued import Rescued, add_rescued
from firnline.schema_registry import MAGIC, PREFIX_BYTES, SchemaRegistry, UnknownSchemaError, open_registry
from firnline.sources.columns import Columns
from firnline.sources.files.formats.parquet import ParquetDecoder, ParquetPiece
from firnline.sources.kafka.clients import registry_errors
from firnline.types import BadReason, Json

Numbers = np.ndarray[Any, Any]
_NO_SCHEMA = -1  # of a value that is no Avro record
_TOMBSTONE = -2


class AvroDecoder:
    """Decodes values, with or without a schema in common, and fits them to the columns of the table.

    A value that cannot be decoded is a bad record. A registry that is away is an error: the task runs again.
    """

    def __init__(
        self, source: str, registry: Mapping[str, Json], schema: pa.Schema, columns: Columns, *, keep_tombstones: bool
    ) -> None:
        self._source = source
        self._registry: SchemaRegistry = open_registry(registry)
        self._decoder = ParquetDecoder(schema, columns)
        self._keep_tombstones = keep_tombstones
        self._schemas: dict[int, Schema | BadReason] = {}

    @property
    def schema(self) -> pa.Schema:
        return self._decoder.schema

    def decode(self, values: Sequence[bytes | None], joined: bytes, lengths: Numbers, lines: Numbers) -> Decoded:
        """Decode values, which are also `joined` with one byte between two; `lines` stand for them in messages.

        Raises:
            SourceError, ConfigError: the registry does not answer.
            UnexpectedFieldError, MismatchError: a value does not fit, and evolution is `fail`.
        """
        sizes = np.maximum(lengths, 0)
        ends = np.cumsum(sizes + 1) - 1
        starts = ends - sizes
        ids = _schema_ids(joined, starts, lengths)
        bad: dict[int, BadReason] = {}
        groups: list[tuple[Numbers, pa.RecordBatch]] = []
        for number in np.unique(ids).tolist():
            members = np.flatnonzero(ids == number)
            if number == _TOMBSTONE:
                if self._keep_tombstones:
                    groups.append((members, _without_values(len(members))))
                continue
            schema = self._find(number) if number != _NO_SCHEMA else "not-avro"
            if isinstance(schema, str):
                bad |= dict.fromkeys(members.tolist(), schema)
                continue
            batch, wrong = decode_records(schema, joined, starts[members] + PREFIX_BYTES, ends[members])
            bad |= {int(members[index]): reason for index, reason in wrong.items()}
            good = np.ones(len(members), np.bool_)
            good[list(wrong)] = False
            groups.append((members[good], batch))
        for _, batch in groups:
            self._decoder.grow(batch.schema)  # all agree on the types before the first is fitted
        fitted = [self._fit(members, batch, bad, lines) for members, batch in groups]
        records = [
            BadRecord(index, int(lines[index]), values[index] or b"", reason) for index, reason in sorted(bad.items())
        ]
        rescued = add_rescued(one for _, _, some in fitted for one in some)
        return Decoded(*self._join([(members, batch) for members, batch, _ in fitted]), records, rescued)

    def _find(self, number: int) -> Schema | BadReason:
        """Return a schema by its id, or why there is none."""
        known = self._schemas.get(number)
        if known is None:
            try:
                with registry_errors(self._source):
                    fetched = self._registry.fetch(number)
                if fetched.kind != "AVRO":
                    raise UnsupportedSchemaError(f"it is {fetched.kind}")
                known = parse_schema(_as_json(fetched.text), [_as_json(text) for text in fetched.references])
            except UnknownSchemaError:
                return "unknown-schema"  # it may be registered later
            except UnsupportedSchemaError:
                known = "unsupported-schema"
            self._schemas[number] = known
        return known

    def _fit(
        self, members: Numbers, batch: pa.RecordBatch, bad: dict[int, BadReason], lines: Numbers
    ) -> tuple[Numbers, pa.RecordBatch, list[Rescued]]:
        """Fit the rows of one schema to the columns; adds those that do not fit to `bad`."""
        try:
            decoded = self._decoder.decode(ParquetPiece(batch, 0, 0))
        except (UnexpectedFieldError, MismatchError) as error:
            raise type(error)(error.field, int(members[error.record]), error.kind) from error
        bad |= {int(members[one.record]): one.reason for one in decoded.bad}
        rescued = [replace(one, line=int(lines[members[one.line - 1]]) if one.line else 0) for one in decoded.rescued]
        return members[decoded.record_numbers.to_numpy()], decoded.batch, rescued

    def _join(self, parts: list[tuple[Numbers, pa.RecordBatch]]) -> tuple[pa.RecordBatch, pa.Array]:
        """Return the rows of all schemas in the order of their values, and their numbers."""
        schema = self.schema
        numbers = np.concatenate([members for members, _ in parts]) if parts else np.zeros(0, np.int64)
        if not schema.names:
            return _without_values(len(numbers)), pa.array(np.sort(numbers))
        whole = [_widened(batch, schema) for _, batch in parts]
        batch = pa.concat_batches(whole) if whole else _empty(schema)
        order = np.argsort(numbers, kind="stable")
        is_sorted = len(parts) < 2
        return (batch if is_sorted else batch.take(pa.array(order))), pa.array(numbers[order])


def _schema_ids(joined: bytes, starts: Numbers, lengths: Numbers) -> Numbers:
    """Return the id of each value's schema, which stands before the record; negative if there is none."""
    data = np.frombuffer(joined, np.uint8)
    is_long = lengths >= PREFIX_BYTES
    places = np.where(is_long, starts, 0)
    if not is_long.any():
        return np.where(lengths < 0, _TOMBSTONE, _NO_SCHEMA)
    ids = np.zeros(len(starts), np.int64)
    for byte in range(1, PREFIX_BYTES):
        ids = ids << 8 | data[places + byte]
    has_magic = is_long & (data[places] == MAGIC)
    return np.where(lengths < 0, _TOMBSTONE, np.where(has_magic, ids, _NO_SCHEMA))


def _as_json(text: str) -> Json:
    """Return the schema of a text; a bare name is one, too."""
    try:
        return json.loads(text)
    except ValueError:
        return text
    except RecursionError as error:
        raise UnsupportedSchemaError("the schema has too many levels") from error


def _without_values(rows: int) -> pa.RecordBatch:
    return pa.RecordBatch.from_struct_array(pa.array([{}] * rows, pa.struct([])))


def _empty(schema: pa.Schema) -> pa.RecordBatch:
    return pa.RecordBatch.from_arrays([pa.array([], field.type) for field in schema], schema=schema)


def _widened(batch: pa.RecordBatch, schema: pa.Schema) -> pa.RecordBatch:
    """Return rows with all columns of a schema, of which they may lack some."""
    names = batch.schema.names
    arrays = [
        batch.column(field.name) if field.name in names else pa.nulls(batch.num_rows, field.type) for field in schema
    ]
    return pa.RecordBatch.from_arrays(arrays, schema=schema)
