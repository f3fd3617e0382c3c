"""The fused task: from a run of files to staged Parquet in one Python worker, on Arrow buffers.

Runs inside Spark's workers, in bounded memory. What comes back is a manifest; rows never do.

A file's rows reach the writer only when the file is known to be whole, or when it is too large to hold; a
large file that then turns out broken, and a column whose type widens after rows were written, make the task
discard its own output and begin again, knowing better.
"""

from __future__ import annotations

import json
import resource
import time
import urllib.parse
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from firnline.clock import monotonic
from firnline.errors import BadRecordsError, SchemaError, SourceError
from firnline.exchange import Edge, ExchangeWriter
from firnline.jobs.quarantine import QuarantineWriter
from firnline.ndjson import (
    Block,
    BlockReader,
    BrokenFileError,
    Decoded,
    DecodeOptions,
    Decoder,
    KindCounter,
    MismatchError,
    UnexpectedFieldError,
    compression_of,
    open_blocks,
)
from firnline.schema import RESCUED_COLUMN, is_column_name_ok, is_json, schema_from_json, schema_to_json
from firnline.sinks.base import Stager
from firnline.sinks.registry import open_stager
from firnline.storage import Readable, Storage, open_storage
from firnline.types import Json

HOLD_BYTES = 48 * 1024 * 1024  # decoded rows of one file that wait until the file is known to be whole
READ_TRIES = 4
READ_BACKOFF_SECS = 0.1
LINEAGE = ("_firnline_file", "_firnline_record", "_firnline_epoch")


class _FileFailedError(Exception):
    """A file cannot be read as it is; the reason is for people."""


class _RestartError(Exception):
    """The task begins again, with what it has learned."""


@dataclass(slots=True)
class _Learned:
    """What survives a restart of the task."""

    schema: pa.Schema
    failed: dict[str, str] = field(default_factory=dict)  # path -> reason


@dataclass(slots=True)
class _Counts:
    records: int = 0
    bad: int = 0
    bytes_read: int = 0
    raw_bytes: int = 0


def run_task(order: dict[str, Json]) -> dict[str, Json]:
    """Read the files of `order`, stage what they hold, and report. `order` comes from `engine.orders`."""
    began = monotonic()
    learned = _Learned(schema_from_json(order["schema"]))
    while True:
        attempt = _Attempt(order, learned)
        try:
            report = attempt.run()
        except _RestartError:
            attempt.discard()
            continue
        except BaseException:
            attempt.discard()
            raise
        report["seconds"] = round(monotonic() - began, 3)
        report["peak_rss_bytes"] = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
        return report


class _Attempt:
    """One pass over the files of a task."""

    def __init__(self, order: dict[str, Json], learned: _Learned) -> None:
        self._order = order
        self._learned = learned
        self._source: Storage = open_storage(order["source"]["root"], order["source"]["storage_options"])
        self._stagers = {t["sink"]: open_stager(t, order["attempt"]) for t in order["targets"]}
        self._exchanges = [ExchangeWriter(Edge.from_json(e), order["exchange"]) for e in order["edges"]]
        self._quarantine = QuarantineWriter(order["quarantine"], order["epoch"], order["attempt"])
        self._options = DecodeOptions(
            evolution=order["evolution"],
            on_mismatch="fail" if order["evolution"] == "fail" else "rescue",
            reserved=frozenset(order["reserved"]),
            kinds=order["kinds"],
        )
        self._decoder = Decoder(learned.schema, order["frozen"], self._options)
        self._kinds = KindCounter(learned.schema, order["frozen"], order["reserved"])
        self._written: pa.Schema | None = None
        self._counts = _Counts()
        self._first_files: dict[str, int] = {}  # by sink: files that the first rows were written to
        self._rescues = False  # rows have `_rescued_data` though no record made the decoder add it

    def run(self) -> dict[str, Json]:
        outcomes: list[dict[str, Json]] = []
        for item in self._order["inputs"]:
            if self._is_full():
                break
            path = item["path"]
            if path not in self._learned.failed:
                outcome = self._read_file(item)
                if outcome is not None:
                    outcomes.append(outcome)
                    continue
            outcomes.append({"path": path, "failed": self._learned.failed[path]})
        staged = {name: stager.close() for name, stager in self._stagers.items()}
        return {
            "outcomes": outcomes,
            "staged": staged,
            "exchanged": {e.edge.name: e.close() for e in self._exchanges},
            "quarantine": self._close_quarantine(),
            "schema": schema_to_json(self._decoder.schema),
            "kinds": self._kinds.to_json(),
            "rescues": self._rescues,
            "records": self._counts.records,
            "bad": self._counts.bad,
            "bytes_read": self._counts.bytes_read,
            "raw_bytes": self._counts.raw_bytes,
        }

    def _close_quarantine(self) -> list[dict[str, Json]]:
        if self._order["replay"]:  # what is bad was put there when the epoch was first read
            self._quarantine.discard()
            return []
        return self._quarantine.close()

    def discard(self) -> None:
        for stager in self._stagers.values():
            stager.discard()
        self._quarantine.discard()

    def _is_full(self) -> bool:
        """The task's share of the epoch is used up. By counts only: a repeat would end at the same place."""
        order, counts = self._order, self._counts
        if counts.records >= order["max_records"] or counts.bytes_read >= order["max_bytes"]:
            return True
        return any(self._has_its_files(name, stager) for name, stager in self._stagers.items())

    def _has_its_files(self, sink: str, stager: Stager) -> bool:
        """Whether a sink has the files that the task may stage for it.

        Where the first rows alone fall into more partitions than that, the limit cannot be kept: an epoch that closed
        for it would only make more small files.
        """
        most = int(self._order["max_output_files"])
        if self._first_files.get(sink, 0) > most:
            return False
        return stager.files_done >= most or stager.files > most

    # -- one file -------------------------------------------------------------------------------------

    def _read_file(self, item: dict[str, Json]) -> dict[str, Json] | None:
        """Read one file as far as the limits allow; None when it failed."""
        before, counted, read = self._decoder.schema, self._counts.records, self._counts.bytes_read
        held: list[Decoded] = []
        held_bytes, spilled = 0, False
        most = self._order["max_records"] - counted
        if "to" in item:  # as an earlier reading of it ended
            most = min(most, int(item["to"]) - int(item["from"]))
        file = _OpenFile(self._source, self._order, item, most)
        try:
            for block in file.blocks():
                decoded = self._decode(item, block)
                self._count(block, file)
                held.append(decoded)
                held_bytes += decoded.batch.nbytes
                if held_bytes > HOLD_BYTES:
                    self._write(item, held)
                    held, held_bytes, spilled = [], 0, True
                if self._is_full():
                    break
            outcome = file.outcome()
        except _FileFailedError as error:
            self._learned.failed[item["path"]] = str(error)
            if spilled:
                raise _RestartError from error
            self._decoder = Decoder(before, self._order["frozen"], self._options)
            self._counts.records, self._counts.bytes_read = counted, read
            return None
        finally:
            file.close()
        self._write(item, held)
        return outcome

    def _count(self, block: Block, file: _OpenFile) -> None:
        self._counts.raw_bytes += len(block.data)
        self._counts.records += block.records
        self._counts.bytes_read += block.consumed_bytes - file.consumed_bytes
        file.consumed_bytes = block.consumed_bytes

    def _decode(self, item: dict[str, Json], block: Block) -> Decoded:
        try:
            decoded = self._decoder.decode(block)
        except (UnexpectedFieldError, MismatchError) as error:
            raise SchemaError(f"{item['path']}: {error}", file=item["path"]) from error
        if decoded.bad and self._order["on_bad_record"] == "fail":
            first = decoded.bad[0]
            raise BadRecordsError(f"{item['path']}, line {first.line}: {first.reason}", file=item["path"])
        return decoded

    # -- rows -----------------------------------------------------------------------------------------

    def _write(self, item: dict[str, Json], held: list[Decoded]) -> None:
        for decoded in held:
            if decoded.bad:
                self._counts.bad += len(decoded.bad)
                self._quarantine.add(item["path"], decoded.bad)
            if decoded.batch.num_rows == 0:
                continue
            self._check_types(decoded.batch.schema)
            self._kinds.add(decoded.batch)
            batch = self._complete(item, decoded)
            for stager in self._stagers.values():
                stager.write(batch)
            for exchange in self._exchanges:
                exchange.write(batch)
        for sink, stager in self._stagers.items():
            if stager.files:
                self._first_files.setdefault(sink, stager.files)

    def _check_types(self, schema: pa.Schema) -> None:
        """Files of one task must agree on types: begin again when a column widened after rows were written."""
        if self._written is not None:
            if self._written.equals(schema, check_metadata=True):
                return
            if retyped(self._written, schema):
                self._learned.schema = schema
                raise _RestartError
        self._written = schema

    def _complete(self, item: dict[str, Json], decoded: Decoded) -> pa.RecordBatch:
        """Add what does not come from the record: folder columns, partitions that no record has, lineage."""
        batch, rows = decoded.batch, decoded.batch.num_rows
        columns, fields = list(batch.columns), list(batch.schema)
        folder = folder_values(item["path"], self._order["source"]["root"])
        misfits: dict[str, str | None] = {}
        for name, kind in self._order["folder_types"].items():
            value = self._folder_value(item, name, folder.get(name), _arrow_type(kind))
            if value[0].as_py() is None and folder.get(name) is not None:
                misfits[name] = folder[name]
            columns.append(pa.repeat(value[0], rows))
            fields.append(pa.field(name, value.type))
        partitions = [n for t in self._order["targets"] for n in t["partition_by"]]
        for name in dict.fromkeys(partitions):
            if name not in {f.name for f in fields}:
                columns.append(pa.nulls(rows, pa.string()))
                fields.append(pa.field(name, pa.string()))
        _check_spelling(item["path"], fields)
        _check_partitions(item["path"], fields, partitions)
        if misfits or any(all(f.name in t["partition_by"] for f in fields) for t in self._order["targets"]):
            # Also for rows of partition columns alone: a Parquet file without a column has no rows.
            _rescue(columns, fields, misfits, rows)
            self._rescues = True
        if self._order["lineage"]:
            columns += [
                pa.repeat(pa.scalar(item["path"]), rows),
                decoded.record_numbers,
                pa.repeat(pa.scalar(self._order["epoch"], pa.int64()), rows),
            ]
            kinds = (pa.string(), pa.int64(), pa.int64())
            fields += [pa.field(name, kind) for name, kind in zip(LINEAGE, kinds, strict=True)]
        return pa.RecordBatch.from_arrays(columns, schema=pa.schema(fields))

    def _folder_value(self, item: dict[str, Json], name: str, text: str | None, kind: pa.DataType) -> pa.Array:
        """The value of a folder column; null when it does not fit, so that it is rescued."""
        try:
            return pa.array([text], pa.string()).cast(kind)
        except (pa.ArrowInvalid, pa.ArrowNotImplementedError) as error:
            if self._order["evolution"] == "fail":
                raise SchemaError(f"{item['path']}: the folder's {name}={text} is no {kind}") from error
            return pa.nulls(1, kind)


class _OpenFile:
    """One file of the source, read from where it was left; tells a file's own faults from the storage's."""

    def __init__(self, source: Storage, order: dict[str, Json], item: dict[str, Json], max_records: int) -> None:
        self._source = source
        self._item = item
        self._max_records = max_records
        self._max_record_bytes = int(order["max_record_bytes"])
        self._key = item["path"].removeprefix(order["source"]["root"]).lstrip("/")
        self._compression = compression_of(item["path"])
        self._stream: Readable | None = None
        self._reader: BlockReader | None = None
        self.consumed_bytes = 0

    def blocks(self) -> Iterator[Block]:
        """The file's blocks.

        Raises:
            _FileFailedError: the file itself is broken, gone, changed or forbidden.
            SourceError: the storage failed; the epoch is tried again.
        """
        try:
            self._reader = self._open()
            yield from self._reader
        except BrokenFileError as error:
            raise _FileFailedError(error.reason) from error
        except FileNotFoundError as error:
            raise _FileFailedError("missing") from error
        except PermissionError as error:
            raise _FileFailedError("permission denied") from error
        except OSError as error:
            raise SourceError(f"cannot read {self._item['path']}: {error}", file=self._item["path"]) from error

    def _open(self) -> BlockReader:
        for attempt in range(READ_TRIES):
            try:
                return self._open_once()
            except (FileNotFoundError, PermissionError):
                raise
            except OSError:
                if attempt == READ_TRIES - 1:
                    raise
                time.sleep(READ_BACKOFF_SECS * 2**attempt)
        raise AssertionError("unreachable")

    def _open_once(self) -> BlockReader:
        item = self._item
        if self._source.stat(self._key).etag != item["etag"]:
            raise BrokenFileError(item["path"], "changed after it was planned")
        offset = 0 if self._compression else int(item["offset"])
        self._stream = self._source.open_read(self._key, offset)
        return open_blocks(
            self._stream,
            path=item["path"],
            compression=self._compression,
            start_offset=offset,
            start_record=int(item["from"]) if offset else 0,
            start_line=int(item["line"]) if offset else 0,
            skip_records=0 if offset else int(item["from"]),
            max_records=self._max_records,
            max_record_bytes=self._max_record_bytes,
        )

    def outcome(self) -> dict[str, Json]:
        """Where reading ended; _FileFailedError when the file was changed meanwhile, so that its rows are a mixture."""
        reader = self._reader
        assert reader is not None
        try:
            etag = self._source.stat(self._key).etag
        except FileNotFoundError:
            etag = self._item["etag"]  # deleted after it was opened: what was read is what it was
        except OSError as error:
            raise SourceError(f"cannot look at {self._item['path']}: {error}") from error
        if etag != self._item["etag"]:
            raise _FileFailedError("changed while it was read")
        return {
            "path": self._item["path"],
            "to": reader.records_read,
            "offset": 0 if self._compression else reader.end_offset,
            "line": reader.lines_read,
            "finished": reader.finished,
        }

    def close(self) -> None:
        if self._stream is not None:
            self._stream.close()


def folder_values(path: str, root: str) -> dict[str, str | None]:
    """The `name=value` folders between the root and the file."""
    found: dict[str, str | None] = {}
    for part in path.removeprefix(root).split("/")[:-1]:
        name, equals, value = part.partition("=")
        if equals and is_column_name_ok(name):
            found[name] = None if value == "__HIVE_DEFAULT_PARTITION__" else urllib.parse.unquote(value)
    return found


def retyped(old: pa.Schema, new: pa.Schema) -> bool:
    """Whether a column of `old` has another type in `new`; new columns and new nested fields do not count."""
    return any(new.get_field_index(f.name) < 0 or _type_differs(f, new.field(f.name)) for f in old)


def _type_differs(old: pa.Field, new: pa.Field) -> bool:
    if pa.types.is_struct(old.type) and pa.types.is_struct(new.type):
        return retyped(pa.schema(list(_children(old.type))), pa.schema(list(_children(new.type))))
    if pa.types.is_list(old.type) and pa.types.is_list(new.type):
        return _type_differs(old.type.value_field, new.type.value_field)
    return bool(old.type != new.type) or is_json(old) != is_json(new)


def _check_spelling(path: str, fields: list[pa.Field]) -> None:
    """Delta cannot hold two columns whose names differ in case alone."""
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


def _rescue(columns: list[Any], fields: list[pa.Field], misfits: dict[str, str | None], rows: int) -> None:
    """Add what does not fit its folder column to `_rescued_data`, which is made when it is not there."""
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


def _children(kind: Any) -> Iterator[pa.Field]:
    return (kind.field(i) for i in range(kind.num_fields))


def _arrow_type(kind: str) -> pa.DataType:
    return schema_from_json([{"name": "x", "type": kind, "nullable": True}]).field(0).type
