"""The fused task: from a split of a source to staged Parquet in one Python worker, on Arrow buffers.

Runs inside Spark's workers, in bounded memory. It returns a report, never rows.

If a column widens after rows were written, the task discards its own output and starts again with the wider type. A
reader may also request this.
"""

from __future__ import annotations

import json
import uuid
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from firnline.errors import SchemaError
from firnline.exchange import ExchangeWriter
from firnline.faults import fault_point
from firnline.jobs.read_job import FIRST_BAD, ReadReport, ReadTask, check_fields
from firnline.names import quarantine_name
from firnline.options import LINEAGE
from firnline.rescued import Rescued, add_rescued, shorten
from firnline.schema import RESCUED_COLUMN, json_field
from firnline.sinks.base import Stager
from firnline.sinks.registry import close_stagers, open_stagers
from firnline.sinks.table_rows import TABLE_COLUMN
from firnline.sources.base import BadRecord, Budget, RestartError, Rows, SplitEnd, SplitReader
from firnline.sources.columns import LINEAGE_TYPES, constant_value, retyped
from firnline.sources.decoding import find_rows
from firnline.sources.guard import guarding
from firnline.sources.headers import add_headers
from firnline.sources.registry import open_reader
from firnline.storage import open_storage
from firnline.types import Json

SHOWN_BYTES = 60  # of a bad record in a message
QUARANTINE_FLUSH_BYTES = 32 * 1024 * 1024
QUARANTINE_SCHEMA = pa.schema(
    [
        ("file", pa.string()),
        ("line", pa.int64()),
        ("record", pa.int64()),
        ("reason", pa.string()),
        ("raw", pa.binary()),
        ("epoch", pa.int64()),
    ]
)


def run_task(task: dict[str, Json]) -> dict[str, Json]:
    """Perform a `ReadTask` and return its `ReadReport`; plain JSON both ways."""
    return read_split(ReadTask.from_json(task)).to_json()


def read_split(task: ReadTask) -> ReadReport:
    """Read a split, stage its rows and pass them on to operators.

    Raises:
        SourceError: the source does not answer; repeating is safe.
        SchemaError, BadRecordsError: a record does not fit, and the settings make this an error.
    """
    columns = {name: port.columns for name, port in task.ports.items()}
    with guarding(task.source, task.source_kind, "open_reader"):
        reader = open_reader(task.source_kind, task.settings, task.split, columns)
    schemas = {name: one.decoded for name, one in columns.items()}
    while True:
        attempt = _Attempt(task, schemas)
        try:
            return attempt.run(reader)
        except RestartError:
            attempt.discard()
            schemas = attempt.schemas
        except BaseException:
            attempt.discard()
            raise


class _Attempt:
    """One pass over a split. `schemas` has the known columns of the records of each port."""

    def __init__(self, task: ReadTask, schemas: Mapping[str, pa.Schema]) -> None:
        self._task = task
        self._ports = {name: _PortWriter(task, name, schemas[name]) for name in task.ports}
        self._quarantine = _QuarantineWriter(task.quarantine, task.source, task.epoch, task.attempt)
        self._budget = Budget(task.split, self._has_output_left)
        self._bad = 0
        self._first_bad: list[str] = []
        self._dropped = 0

    @property
    def schemas(self) -> dict[str, pa.Schema]:
        return {name: port.schema for name, port in self._ports.items()}

    def run(self, reader: SplitReader) -> ReadReport:
        for group in self._read(reader):
            self._write(group)
        ports = self._ports
        return ReadReport(
            staged=close_stagers({sink: s for port in ports.values() for sink, s in port.stagers.items()}),
            exchanged={e.edge.name: e.close() for port in ports.values() for e in port.exchanges},
            end=self._end(reader),
            rows={name: port.rows for name, port in ports.items()},
            rescues=[name for name, port in ports.items() if port.rescues],
            rescued=[replace(one, source=name) for name, port in ports.items() for one in port.rescued],
            first_bad=self._first_bad,
            keyless={name: port.keyless for name, port in ports.items() if port.keyless},
            filled={name: sorted(port.filled) for name, port in ports.items() if port.filled},
            quarantine=self._close_quarantine(),
            records=self._budget.records,
            bad=self._bad,
            dropped=self._dropped,
            bytes_read=self._budget.bytes_read,
            raw_bytes=self._budget.raw_bytes,
        )

    def _read(self, reader: SplitReader) -> Iterator[Sequence[Rows]]:
        with guarding(self._task.source, self._task.source_kind, "read"):
            yield from reader.read(self.schemas, self._budget)

    def _end(self, reader: SplitReader) -> SplitEnd:
        with guarding(self._task.source, self._task.source_kind, "end"):
            return reader.end()

    def _close_quarantine(self) -> list[dict[str, Json]]:
        if self._task.replay:  # the first read of the epoch quarantined the bad records
            self._quarantine.discard()
            return []
        return self._quarantine.close()

    def discard(self) -> None:
        for port in self._ports.values():
            for stager in port.stagers.values():
                stager.discard()
        self._quarantine.discard()

    def _has_output_left(self) -> bool:
        return all(port.has_output_left() for port in self._ports.values())

    def _write(self, group: Sequence[Rows]) -> None:
        for rows in group:
            if rows.bad:
                self._bad += len(rows.bad)
                for bad in rows.bad[: FIRST_BAD - len(self._first_bad)]:
                    head = shorten(repr(bytes(bad.raw[:SHOWN_BYTES]))[2:-1])
                    self._first_bad.append(f"{rows.origin} line {bad.line}: {bad.reason}: {head}")
                self._quarantine.add(rows.origin, rows.bad, rows.header)
            if rows.port in self._ports:
                self._ports[rows.port].write(rows)
            else:
                self._dropped += rows.batch.num_rows
        for port in self._ports.values():
            port.note_first_files()


class _PortWriter:
    """Writes the rows of one port to its sinks and operators. `schema` has the known columns of the records."""

    def __init__(self, task: ReadTask, port: str, schema: pa.Schema) -> None:
        self.schema = schema
        self.rows = 0
        self.rescues = False  # rows have `_rescued_data` though the reader did not add it for a record
        self.rescued: list[Rescued] = []  # by column
        self.keyless: dict[str, str] = {}  # key column -> the first row without a value there
        self.filled: set[str] = set()  # partition columns that have a value in some row
        self._keys = task.ports[port].keys
        self._task = task
        self._columns = task.ports[port].columns
        self._targets = task.ports[port].output.targets
        self._partitions = tuple(dict.fromkeys(name for target in self._targets for name in target["partition_by"]))
        self.stagers = open_stagers(self._targets, task.attempt)
        self.exchanges = [ExchangeWriter(edge, task.exchange) for edge in task.ports[port].output.edges]
        self._written: pa.Schema | None = None
        self._first_files: dict[str, int] = {}  # by sink: files of the first rows

    def has_output_left(self) -> bool:
        """Return whether every sink may take more files."""
        return not any(self._has_its_files(sink, stager) for sink, stager in self.stagers.items())

    def _has_its_files(self, sink: str, stager: Stager) -> bool:
        """Return whether a sink has reached the limit of files that the task may stage for it.

        If the first rows alone have more partitions than that, the limit cannot be kept: closing the epoch early would
        only make more small files.
        """
        most = self._task.split.max_output_files
        if self._first_files.get(sink, 0) > most:
            return False
        return stager.files_done >= most or stager.files > most

    def note_first_files(self) -> None:
        """Note how many files the first rows of each sink have."""
        for sink, stager in self.stagers.items():
            if stager.files:
                self._first_files.setdefault(sink, stager.files)

    def write(self, rows: Rows) -> None:
        """Write rows to every destination.

        Raises:
            RestartError: a column widened after rows were written; `schema` has it now.
        """
        if rows.batch.num_rows == 0:
            return
        self._check_types(rows.batch.schema)
        self._check_new_partitions(rows.batch.schema)
        batch = self._complete(rows)
        if rows.rescued:
            self.rescued = add_rescued([*self.rescued, *rows.rescued])
        self._note_keyless(rows, batch)
        self._note_filled(batch)
        self.rows += batch.num_rows
        for stager in self.stagers.values():
            stager.note_origin(rows.origin, rows.record_numbers)
            stager.write(batch)
        for exchange in self.exchanges:
            exchange.write(batch)

    def _check_types(self, schema: pa.Schema) -> None:
        """Check that the files of one task agree on types: start again if a column widened after rows were written.

        Rows of many tables have columns of their own.
        """
        if TABLE_COLUMN in schema.names:
            return
        if self._written is not None:
            if self._written.equals(schema, check_metadata=True):
                return
            if retyped(self._written, schema):
                self.schema = schema
                raise RestartError
        self._written = schema

    def _note_keyless(self, rows: Rows, batch: pa.RecordBatch) -> None:
        """Note the first row that lacks a value of a key."""
        is_row = find_rows(batch)
        for name in self._keys:
            index = batch.schema.get_field_index(name)
            if name in self.keyless or (index >= 0 and not batch.column(index).null_count):
                continue
            lacks = pc.is_null(batch.column(index)) if index >= 0 else pa.repeat(pa.scalar(True), batch.num_rows)
            at = pc.index(lacks if is_row is None else pc.and_(lacks, is_row), True).as_py()
            if at < 0:
                continue
            self.keyless[name] = f"{rows.origin}, record {rows.record_numbers[at].as_py()}"

    def _note_filled(self, batch: pa.RecordBatch) -> None:
        """Note which partition columns have a value."""
        for name in self._partitions:
            if name not in self.filled and batch.column(name).null_count < batch.num_rows:
                self.filled.add(name)

    def _check_new_partitions(self, schema: pa.Schema) -> None:
        """Start again with JSON text for a nested partition column whose type the values of all tasks still decide."""
        undecided = set(self._partitions) - self._columns.frozen - self._columns.kinds.keys()
        nested = {f.name for f in schema if f.name in undecided and pa.types.is_nested(f.type)}
        if nested:
            self.schema = pa.schema([json_field(f.name, f.nullable) if f.name in nested else f for f in schema])
            raise RestartError

    def _complete(self, rows: Rows) -> pa.RecordBatch:
        """Add the columns that do not come from the record: constants, missing partitions, lineage."""
        batch, count = rows.batch, rows.batch.num_rows
        columns, fields = list(batch.columns), list(batch.schema)
        misfits: dict[str, str | None] = {}
        for name, kind in self._columns.constants.items():
            text = rows.constants.get(name)
            value = constant_value(text, kind)
            if value[0].as_py() is None and text is not None:
                if self._columns.evolution == "fail":
                    raise SchemaError(f"{rows.origin}: the folder's {name}={text} is no {kind}")
                misfits[name] = text
                one = Rescued(name, count, kind, shorten(json.dumps(text, ensure_ascii=False)), rows.origin)
                self.rescued = add_rescued([*self.rescued, one])
            columns.append(pa.repeat(value[0], count))
            fields.append(pa.field(name, value.type))
        for name in self._partitions:
            if name not in {f.name for f in fields}:
                columns.append(pa.nulls(count, pa.string()))
                fields.append(pa.field(name, pa.string()))
        check_fields(rows.origin, fields, self._partitions)
        if misfits or any(all(f.name in t["partition_by"] for f in fields) for t in self._targets):
            # Also for rows of partition columns alone: a Parquet file without a column has no rows.
            _rescue(columns, fields, misfits, count)
            self.rescues = True
        if self._task.lineage:
            columns += [
                pa.repeat(pa.scalar(rows.origin), count),
                rows.record_numbers,
                pa.repeat(pa.scalar(self._task.epoch, pa.int64()), count),
            ]
            fields += [pa.field(name, kind) for name, kind in zip(LINEAGE, LINEAGE_TYPES, strict=True)]
        return pa.RecordBatch.from_arrays(columns, schema=pa.schema(fields))


def _rescue(columns: list[Any], fields: list[pa.Field], misfits: Mapping[str, str | None], rows: int) -> None:
    """Add values that do not fit their constant column to `_rescued_data`, which is created if needed."""
    index = next((i for i, f in enumerate(fields) if f.name == RESCUED_COLUMN), None)
    if index is None:
        columns.append(pa.nulls(rows, pa.string()))
        fields.append(pa.field(RESCUED_COLUMN, pa.string()))
        index = len(fields) - 1
    if misfits:
        text = json.dumps(misfits, ensure_ascii=False)
        rescued = columns[index]
        merged = pc.binary_join_element_wise(text[:-1], pc.utf8_slice_codeunits(rescued, 1), ",")
        columns[index] = pc.if_else(pc.is_null(rescued), text, merged)


class _QuarantineWriter:
    """Stages the bad records of one task: raw bytes, file, line and reason, and the headers of files.

    They become true once a commit's ledger entry names the file. `target` is `{root, storage_options, folder}`.
    """

    def __init__(self, target: dict[str, Json], source: str, epoch: int, attempt: str) -> None:
        self._source = source
        self._storage = open_storage(target["root"], target["storage_options"])
        self._folder = target["folder"]
        self._epoch = epoch
        self._attempt = attempt
        self._rows: list[dict[str, Json]] = []
        self._headers: dict[str, bytes] = {}  # by file
        self._size_bytes = 0
        self._files: list[dict[str, Json]] = []

    def add(self, path: str, records: Sequence[BadRecord], header: bytes | None) -> None:
        """Add the bad records of one file."""
        if header is not None:
            if self._headers.get(path, header) != header:  # of another reading of the file
                self._flush()
            if path not in self._headers:
                self._headers[path] = header
                self._size_bytes += len(header)
        for bad in records:
            self._rows.append(
                {
                    "file": path,
                    "line": bad.line,
                    "record": bad.record,
                    "reason": bad.reason,
                    "raw": bytes(bad.raw),
                    "epoch": self._epoch,
                }
            )
            self._size_bytes += len(bad.raw) + 64
        if self._size_bytes > QUARANTINE_FLUSH_BYTES:
            self._flush()

    def close(self) -> list[dict[str, Json]]:
        """Make everything durable and return the files."""
        self._flush()
        return self._files

    def discard(self) -> None:
        """Delete the files of this writer."""
        for file in self._files:
            self._storage.delete(f"{self._folder}/{file['name']}")
        self._files, self._rows, self._headers = [], [], {}

    def _flush(self) -> None:
        if not self._rows:
            return
        name = quarantine_name(self._epoch, self._attempt, uuid.uuid4().hex)
        sink = pa.BufferOutputStream()
        schema = add_headers(QUARANTINE_SCHEMA, self._headers)
        pq.write_table(pa.Table.from_pylist(self._rows, schema=schema), sink, compression="zstd")
        fault_point("stage.quarantine.before")
        self._storage.put(f"{self._folder}/{name}", sink.getvalue().to_pybytes())
        fault_point("stage.quarantine.after")
        reasons = Counter(str(row["reason"]) for row in self._rows)
        self._files.append({"name": name, "rows": len(self._rows), "reasons": dict(reasons), "source": self._source})
        self._rows, self._headers, self._size_bytes = [], {}, 0
