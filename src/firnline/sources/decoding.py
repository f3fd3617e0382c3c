"""Decoders: turn records in pieces, of files or of messages, into batches. `LineDecoder` reads lines of JSON."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any, Generic, Protocol, TypeVar

import pyarrow as pa
import pyarrow.compute as pc

from firnline.ndjson import Block, Decoded, DecodeOptions, Decoder, KindCounter
from firnline.options import OP, TRUNCATE
from firnline.schema import RESCUED_COLUMN
from firnline.sources.columns import Columns


class Piece(Protocol):
    """Records of one input that are decoded together."""

    @property
    def records(self) -> int:
        """How many records, bad ones included."""

    @property
    def size_bytes(self) -> int:
        """Their size before they are decoded."""

    @property
    def consumed_bytes(self) -> int:
        """Bytes of the stored file read so far."""


P = TypeVar("P", bound=Piece)


class RecordDecoder(ABC, Generic[P]):
    """Turns the pieces of files into batches, and adds columns to the schema as they appear.

    Its rows have at least the columns of `schema`; those that `columns` freezes keep their types.
    """

    def __init__(self, schema: pa.Schema, columns: Columns) -> None:
        self._columns = columns
        self.reset(schema)

    @property
    @abstractmethod
    def schema(self) -> pa.Schema:
        """The schema of the newest batch."""

    @abstractmethod
    def reset(self, schema: pa.Schema) -> None:
        """Continue with another schema: rows of other files came in between, or rows decoded last do not count."""

    @abstractmethod
    def decode(self, piece: P) -> Decoded:
        """Decode one piece.

        Raises:
            UnexpectedFieldError: an unknown field, and evolution is `fail`.
            MismatchError: a value does not fit, and evolution is `fail`.
        """

    def count(self, batch: pa.RecordBatch) -> None:
        """Count the kinds of values in a batch that is handed on. A format with types of its own counts nothing."""

    def kinds(self) -> dict[str, dict[str, int]]:
        """Return the counted kinds of values by path; see `ndjson.infer`."""
        return {}


def find_rows(batch: pa.RecordBatch) -> pa.Array | None:
    """Return which change rows are about one row, and so have its key; None if all are: no table was emptied."""
    index = batch.schema.get_field_index(OP)
    if index < 0 or not pa.types.is_string(batch.schema.field(index).type):
        return None
    is_row = pc.not_equal(pc.fill_null(batch.column(index), ""), TRUNCATE)
    return None if pc.all(is_row, min_count=0).as_py() else is_row


def with_rescued(decoder: RecordDecoder[Any], batch: pa.RecordBatch, rescued: pa.Array) -> pa.RecordBatch:
    """Add the rescued values that rows came with to those that `decoder` found not to fit."""
    index = batch.schema.get_field_index(RESCUED_COLUMN)
    if index < 0:
        field = pa.field(RESCUED_COLUMN, pa.string())
        decoder.reset(decoder.schema.append(field))
        return batch.append_column(field, rescued)
    own = batch.column(index)
    both = pc.binary_join_element_wise(pc.utf8_slice_codeunits(rescued, 0, -1), pc.utf8_slice_codeunits(own, 1), ",")
    merged = pc.if_else(pc.is_null(own), rescued, pc.if_else(pc.is_null(rescued), own, both))
    return batch.set_column(index, batch.schema.field(index), merged)


class LineDecoder(RecordDecoder[Block]):
    """Decodes lines of JSON, whatever format they come from."""

    def __init__(self, schema: pa.Schema, columns: Columns) -> None:
        self._options = DecodeOptions(
            evolution=columns.evolution,
            on_mismatch="fail" if columns.evolution == "fail" else "rescue",
            reserved=columns.reserved,
            kinds=columns.kinds,
            infer_timestamps=columns.infer_timestamps,
            strict=columns.strict,
        )
        self._kinds = KindCounter(schema, columns.frozen, columns.reserved, columns.infer_timestamps)
        super().__init__(schema, columns)

    @property
    def schema(self) -> pa.Schema:
        return self._decoder.schema

    def reset(self, schema: pa.Schema) -> None:
        self._decoder = Decoder(schema, self._columns.frozen, self._options)

    def decode(self, piece: Block) -> Decoded:
        return self._decoder.decode(piece)

    def count(self, batch: pa.RecordBatch) -> None:
        self._kinds.add(batch)

    def kinds(self) -> dict[str, dict[str, int]]:
        return self._kinds.to_json()
