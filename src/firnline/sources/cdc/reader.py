"""Reads spool files in a worker: the change rows of each table, and the envelope of all changes."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from firnline.errors import SchemaError, SourceError
from firnline.ndjson import MismatchError, UnexpectedFieldError
from firnline.options import FACTS, MISSING, OP
from firnline.rescued import Rescued, shorten
from firnline.sources.base import MAIN_PORT, Budget, ReadColumns, Rows, Split, SplitEnd, SplitReader
from firnline.sources.cdc.log import Changes, Decoded, LogDecoder, Op
from firnline.sources.cdc.reader_settings import LogReaderSettings
from firnline.sources.cdc.schemas import SchemaVersion, new_versions, versions_of
from firnline.sources.cdc.spool import SpoolFile, read_file
from firnline.sources.cdc.tables import port_of
from firnline.sources.columns import Columns
from firnline.sources.decoding import with_rescued
from firnline.sources.files.formats.arrow_json import json_texts
from firnline.sources.files.formats.parquet import ParquetDecoder, ParquetPiece
from firnline.storage import open_storage
from firnline.types import Json

BATCH_ROWS = 65_536
COMMITTED_AT, POSITION, TRANSACTION = FACTS
BEFORE = "_before"
TABLE, AFTER_JSON, BEFORE_JSON = "_table", "after", "before"  # of the envelope, beside those above
_MICROS = pa.timestamp("us", "UTC")
_WORDS = pa.array([op.name.lower() for op in Op])


@dataclass(slots=True)
class _Read:
    """How the reading of one file ended."""

    path: str
    rows: int
    schemas: list[SchemaVersion] = field(default_factory=list)  # used by change rows, in order

    def to_json(self) -> dict[str, Json]:
        return {"path": self.path, "rows": self.rows, "schemas": [one.to_json() for one in self.schemas]}


class LogReader(SplitReader):
    """Reads the files of one split, one after the other."""

    def __init__(
        self,
        settings: dict[str, Json],
        split: Split,
        ports: Mapping[str, Columns],
        open_decoder: Callable[[bool], LogDecoder],
    ) -> None:
        self._settings = LogReaderSettings.from_json(settings)
        self._files = [SpoolFile.from_json(item) for item in split.inputs]
        self._ports = ports
        self._decoder = open_decoder(self._settings.wants_before or MAIN_PORT in ports)
        self._storage = open_storage(self._settings.root, self._settings.storage_options)

    def read(self, schemas: Mapping[str, pa.Schema], budget: Budget) -> Iterator[Sequence[Rows]]:
        self._outcomes: list[_Read] = []
        self._fitters = {port: ParquetDecoder(schemas[port], columns) for port, columns in self._ports.items()}
        for file in self._files:
            try:
                content = read_file(self._storage, self._settings.folder, file)
            except OSError as error:
                raise SourceError(f"cannot read the spool file {file.name}: {error}") from error
            decoded = self._decoder.decode(content.context, content.frames)
            outcome = _Read(file.name, 0)
            for rows in self._rows(file.name, decoded):
                outcome.rows += rows.batch.num_rows
                budget.records += rows.batch.num_rows + len(rows.bad)
                yield [rows]
            outcome.schemas = new_versions({}, versions_of(decoded))
            budget.bytes_read += file.size_bytes
            budget.raw_bytes += len(content.frames)
            self._outcomes.append(outcome)

    def end(self) -> SplitEnd:
        columns = {port: ReadColumns(fitter.schema) for port, fitter in self._fitters.items()}
        return SplitEnd([outcome.to_json() for outcome in self._outcomes], columns)

    # -- rows -----------------------------------------------------------------------------------------

    def _rows(self, origin: str, decoded: Decoded) -> Iterator[Rows]:
        for changes in decoded.changes:
            port = port_of(changes.schema.table, self._settings.default_schema)
            if port in self._ports:
                yield from self._fit(origin, port, self._change_rows(changes, decoded), changes.order, changes.odd)
        if MAIN_PORT in self._ports and decoded.changes:
            batch, order = self._envelope(decoded)
            yield from self._fit(origin, MAIN_PORT, batch, order, {})

    def _change_rows(self, changes: Changes, decoded: Decoded) -> pa.RecordBatch:
        """Return the rows of a table, with the columns that say what happened."""
        columns = dict(zip(changes.rows.schema.names, changes.rows.columns, strict=True))
        columns[OP] = _WORDS.take(pa.array(changes.ops))
        missing = _missing(changes)
        if missing is not None:
            columns[MISSING] = missing
        facts = self._facts(changes, decoded)
        columns |= {name: values for name, values in facts.items() if name[1:] in self._settings.include}
        if self._settings.wants_before and changes.before is not None:
            columns[BEFORE] = changes.before
        return pa.RecordBatch.from_pydict(columns)

    def _facts(self, changes: Changes, decoded: Decoded) -> dict[str, pa.Array]:
        index = pa.array(changes.transaction)
        times = np.array([one.committed_at for one in decoded.transactions], np.int64)
        known = pa.array(times, mask=times == 0)
        return {
            COMMITTED_AT: known.cast(_MICROS).take(index),
            POSITION: pa.array([one.position for one in decoded.transactions], pa.string()).take(index),
            TRANSACTION: pa.array([one.id for one in decoded.transactions], pa.string()).take(index),
        }

    def _envelope(self, decoded: Decoded) -> tuple[pa.RecordBatch, npt.NDArray[np.int64]]:
        """Return all changes in the order of the log: what happened, where, and the rows as JSON."""
        parts: list[pa.RecordBatch] = []
        for changes in decoded.changes:
            is_row = pa.array(~np.isin(changes.ops, (Op.DELETE, Op.TRUNCATE)))
            after = pc.if_else(is_row, json_texts(changes.rows.to_struct_array()), pa.scalar(None, pa.string()))
            before = _before_texts(changes)
            missing = _missing(changes)
            columns = {
                OP: _WORDS.take(pa.array(changes.ops)),
                TABLE: pa.repeat(pa.scalar(changes.schema.table), len(changes.ops)),
                **self._facts(changes, decoded),
                AFTER_JSON: after,
                BEFORE_JSON: before,
                MISSING: missing if missing is not None else pa.nulls(len(changes.ops), pa.list_(pa.string())),
            }
            parts.append(pa.RecordBatch.from_pydict(columns))
        order = np.concatenate([changes.order for changes in decoded.changes])
        place = np.argsort(order, kind="stable")
        whole = pa.Table.from_batches(parts).combine_chunks().take(pa.array(place))
        return whole.combine_chunks().to_batches()[0], order[place]

    def _fit(
        self,
        origin: str,
        port: str,
        batch: pa.RecordBatch,
        order: npt.NDArray[np.int64],
        odd: Mapping[str, Mapping[int, str]],
    ) -> Iterator[Rows]:
        """Fit change rows to the columns of their port."""
        fitter = self._fitters[port]
        rescued = _rescued_texts(odd, batch.num_rows) if odd else None
        for start in range(0, batch.num_rows, BATCH_ROWS):
            part = batch.slice(start, BATCH_ROWS)
            try:
                fitted = fitter.decode(ParquetPiece(part, start, 0))
            except (UnexpectedFieldError, MismatchError) as error:
                raise SchemaError(f"{origin}: {error}", file=origin) from error
            places = fitted.record_numbers
            made, counts = fitted.batch, [replace(one, file=origin) for one in fitted.rescued]
            if rescued is not None:
                made = with_rescued(fitter, made, rescued.take(places))
                counts += _count_odd(odd, origin) if start == 0 else []
            yield Rows(origin, made, pa.array(order).take(places), fitted.bad, port=port, rescued=counts)


def _missing(changes: Changes) -> pa.Array | None:
    """Return for every row the columns whose values the log left out; None if it has all of them.

    Of a delete the key is enough. A change row that empties the table has none.
    """
    names = [column.name for column in changes.schema.columns]
    asked, empties = changes.ops != Op.DELETE, changes.ops == Op.TRUNCATE
    known = {name: mask & asked for name, mask in zip(names, changes.missing, strict=True) if mask is not None}
    masks = {name: known.get(name, empties) | empties for name in names}
    masks = {name: mask for name, mask in masks.items() if mask.any()}
    if not masks:
        return None
    flags = np.stack(list(masks.values()), axis=1)
    counts = flags.sum(axis=1)
    offsets = np.concatenate(([0], np.cumsum(counts))).astype(np.int32)
    values = pa.array(list(masks), pa.string()).take(pa.array(np.nonzero(flags)[1]))
    return pa.ListArray.from_arrays(pa.array(offsets), values, mask=pa.array(counts == 0))


def _before_texts(changes: Changes) -> pa.Array:
    """Return the rows before the changes as JSON; of a delete at least what the log has of it."""
    is_delete = changes.ops == Op.DELETE
    texts = pa.nulls(len(changes.ops), pa.string())
    if changes.before is not None:
        texts = json_texts(changes.before)
    if is_delete.any():
        texts = pc.if_else(pa.array(is_delete), json_texts(changes.rows.to_struct_array()), texts)
    return texts


def _rescued_texts(odd: Mapping[str, Mapping[int, str]], rows: int) -> pa.Array:
    found: dict[int, dict[str, str]] = {}
    for column, values in odd.items():
        for row, text in values.items():
            found.setdefault(row, {})[column] = text
    texts: list[str | None] = [None] * rows
    for row, kept in found.items():
        texts[row] = json.dumps(kept, ensure_ascii=False)
    return pa.array(texts, pa.string())


def _count_odd(odd: Mapping[str, Mapping[int, str]], origin: str) -> list[Rescued]:
    counts = []
    for column, values in odd.items():
        first = next(iter(values.values()))
        counts.append(Rescued(column, len(values), first=shorten(json.dumps(first, ensure_ascii=False)), file=origin))
    return counts
