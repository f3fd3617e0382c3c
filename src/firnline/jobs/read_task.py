"""The fused task: from a split of a source to staged Parquet in one Python worker, on Arrow buffers.

Runs inside Spark's workers, in bounded memory. It returns a report, never rows.

If a column widens after rows were written, the task discards its own output and starts again with the wider type. A
reader may also request this.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from firnline.errors import SchemaError
from firnline.exchange import ExchangeWriter
from firnline.jobs.quarantine import QuarantineWriter
from firnline.jobs.read_orders import ReadOrder, ReadReport
from firnline.schema import RESCUED_COLUMN, schema_from_json
from firnline.sinks.base import Stager
from firnline.sinks.registry import open_stager
from firnline.sources.base import MAIN_PORT, Budget, RestartError, Rows, SplitReader
from firnline.sources.columns import LINEAGE, LINEAGE_TYPES, retyped
from firnline.sources.registry import open_reader
from firnline.types import Json


def run_task(order: dict[str, Json]) -> dict[str, Json]:
    """Perform a `ReadOrder` and return its `ReadReport`; plain JSON both ways."""
    return read_split(ReadOrder.from_json(order)).to_json()


def read_split(order: ReadOrder) -> ReadReport:
    """Read a split, stage its rows and pass them on to operators.

    Raises:
        SourceError: the source does not answer; repeating is safe.
        SchemaError, BadRecordsError: a record does not fit, and the settings make this an error.
    """
    reader = open_reader(order.source_kind, order.settings, order.split, order.columns)
    schema = order.columns.decoded
    while True:
        attempt = _Attempt(order, schema)
        try:
            return attempt.run(reader)
        except RestartError:
            attempt.discard()
            schema = attempt.schema
        except BaseException:
            attempt.discard()
            raise


class _Attempt:
    """One pass over a split. `schema` has the known columns of the records."""

    def __init__(self, order: ReadOrder, schema: pa.Schema) -> None:
        self.schema = schema
        self._order = order
        self._stagers = {t["sink"]: open_stager(t, order.attempt) for t in order.targets}
        self._exchanges = [ExchangeWriter(edge, order.exchange) for edge in order.edges]
        self._quarantine = QuarantineWriter(order.quarantine, order.epoch, order.attempt)
        self._budget = Budget(order.split, self._has_output_left)
        self._written: pa.Schema | None = None
        self._bad = 0
        self._first_files: dict[str, int] = {}  # by sink: files of the first rows
        self._rescues = False  # rows have `_rescued_data` though the reader did not add it for a record

    def run(self, reader: SplitReader) -> ReadReport:
        for rows in reader.read(self.schema, self._budget):
            self._write(rows)
        staged = {name: stager.close() for name, stager in self._stagers.items()}
        return ReadReport(
            end=reader.end(),
            staged=staged,
            exchanged={e.edge.name: e.close() for e in self._exchanges},
            quarantine=self._close_quarantine(),
            rescues=self._rescues,
            records=self._budget.records,
            bad=self._bad,
            bytes_read=self._budget.bytes_read,
            raw_bytes=self._budget.raw_bytes,
        )

    def _close_quarantine(self) -> list[dict[str, Json]]:
        if self._order.replay:  # the first read of the epoch quarantined the bad records
            self._quarantine.discard()
            return []
        return self._quarantine.close()

    def discard(self) -> None:
        for stager in self._stagers.values():
            stager.discard()
        self._quarantine.discard()

    def _has_output_left(self) -> bool:
        return not any(self._has_its_files(name, stager) for name, stager in self._stagers.items())

    def _has_its_files(self, sink: str, stager: Stager) -> bool:
        """Return whether a sink has reached the limit of files that the task may stage for it.

        If the first rows alone have more partitions than that, the limit cannot be kept: closing the epoch early would
        only make more small files.
        """
        most = self._order.split.max_output_files
        if self._first_files.get(sink, 0) > most:
            return False
        return stager.files_done >= most or stager.files > most

    # -- rows -----------------------------------------------------------------------------------------

    def _write(self, group: Sequence[Rows]) -> None:
        for rows in group:
            assert rows.port == MAIN_PORT
            if rows.bad:
                self._bad += len(rows.bad)
                self._quarantine.add(rows.origin, rows.bad)
            if rows.batch.num_rows == 0:
                continue
            self._check_types(rows.batch.schema)
            batch = self._complete(rows)
            for stager in self._stagers.values():
                stager.write(batch)
            for exchange in self._exchanges:
                exchange.write(batch)
        for sink, stager in self._stagers.items():
            if stager.files:
                self._first_files.setdefault(sink, stager.files)

    def _check_types(self, schema: pa.Schema) -> None:
        """Check that the files of one task agree on types: start again if a column widened after rows were written."""
        if self._written is not None:
            if self._written.equals(schema, check_metadata=True):
                return
            if retyped(self._written, schema):
                self.schema = schema
                raise RestartError
        self._written = schema

    def _complete(self, rows: Rows) -> pa.RecordBatch:
        """Add the columns that do not come from the record: constants, missing partitions, lineage."""
        order, batch, count = self._order, rows.batch, rows.batch.num_rows
        columns, fields = list(batch.columns), list(batch.schema)
        misfits: dict[str, str | None] = {}
        for name, kind in order.columns.constants.items():
            value = self._constant(rows, name, _arrow_type(kind))
            if value[0].as_py() is None and rows.constants.get(name) is not None:
                misfits[name] = rows.constants[name]
            columns.append(pa.repeat(value[0], count))
            fields.append(pa.field(name, value.type))
        partitions = [n for t in order.targets for n in t["partition_by"]]
        for name in dict.fromkeys(partitions):
            if name not in {f.name for f in fields}:
                columns.append(pa.nulls(count, pa.string()))
                fields.append(pa.field(name, pa.string()))
        _check_spelling(rows.origin, fields)
        _check_partitions(rows.origin, fields, partitions)
        if misfits or any(all(f.name in t["partition_by"] for f in fields) for t in order.targets):
            # Also for rows of partition columns alone: a Parquet file without a column has no rows.
            _rescue(columns, fields, misfits, count)
            self._rescues = True
        if order.lineage:
            columns += [
                pa.repeat(pa.scalar(rows.origin), count),
                rows.record_numbers,
                pa.repeat(pa.scalar(order.epoch, pa.int64()), count),
            ]
            fields += [pa.field(name, kind) for name, kind in zip(LINEAGE, LINEAGE_TYPES, strict=True)]
        return pa.RecordBatch.from_arrays(columns, schema=pa.schema(fields))

    def _constant(self, rows: Rows, name: str, kind: pa.DataType) -> pa.Array:
        """Return the value of a constant column; null if it does not fit, so that it is rescued."""
        text = rows.constants.get(name)
        try:
            return pa.array([text], pa.string()).cast(kind)
        except (pa.ArrowInvalid, pa.ArrowNotImplementedError) as error:
            if self._order.columns.evolution == "fail":
                raise SchemaError(f"{rows.origin}: the folder's {name}={text} is no {kind}") from error
            return pa.nulls(1, kind)


def _check_spelling(path: str, fields: list[pa.Field]) -> None:
    """Refuse columns whose names differ only in case, which Delta cannot hold."""
    seen: dict[str, str] = {}
    for name in (f.name for f in fields):
        other = seen.setdefault(name.lower(), name)
        if other != name:
            raise SchemaError(
                f"{path}: columns {other!r} and {name!r} differ in case alone",
                hint="Spell partition_by, declared fields and folder names as the records do.",
            )


def _check_partitions(path: str, fields: list[pa.Field], partitions: list[str]) -> None:
    for field_ in fields:
        if field_.name in partitions and pa.types.is_nested(field_.type):
            raise SchemaError(f"{path}: partition_by names {field_.name!r}, which holds {field_.type}")


def _rescue(columns: list[Any], fields: list[pa.Field], misfits: Mapping[str, str | None], rows: int) -> None:
    """Add values that do not fit their constant column to `_rescued_data`, which is created if needed."""
    index = next((i for i, f in enumerate(fields) if f.name == RESCUED_COLUMN), None)
    if index is None:
        columns.append(pa.nulls(rows, pa.string()))
        fields.append(pa.field(RESCUED_COLUMN, pa.string()))
        index = len(fields) - 1
    if misfits:
        text = json.dumps(misfits, ensure_ascii=False)
        held = columns[index]
        merged = pc.binary_join_element_wise(text[:-1], pc.utf8_slice_codeunits(held, 1), ",")
        columns[index] = pc.if_else(pc.is_null(held), text, merged)


def _arrow_type(kind: str) -> pa.DataType:
    return schema_from_json([{"name": "x", "type": kind, "nullable": True}]).field(0).type
