"""Reads a range of files in a worker: files of any format to Arrow batches, in bounded memory.

The rows of a file are handed on only when the file is known to be whole, or when it is too large to hold. A large file
that then turns out broken makes the task begin again without it.
"""

from __future__ import annotations

import time
import uuid
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import pyarrow as pa

from firnline.errors import BadRecordsError, SchemaError, SourceError
from firnline.ndjson import BrokenFileError, Decoded, MismatchError, UnexpectedFieldError
from firnline.ndjson.infer import Counts, add_counts
from firnline.sources.base import (
    MAIN_PORT,
    Budget,
    ReadColumns,
    RestartError,
    Rows,
    Split,
    SplitEnd,
    SplitReader,
)
from firnline.sources.columns import Columns
from firnline.sources.decoding import Piece, RecordDecoder
from firnline.sources.files.formats import open_format
from firnline.sources.files.formats.base import Format, Place, RecordReader, StoredFile
from firnline.sources.files.formats.lines import NdjsonFormat
from firnline.sources.files.growth import Change, ReadFile, find_growth
from firnline.sources.files.listing import is_gone
from firnline.sources.files.messages import FileOutcome, FileReaderSettings
from firnline.sources.files.planning import folder_values
from firnline.sources.files.replayed import load_quarantined
from firnline.storage import FileStat, Storage, open_storage
from firnline.types import BadReason, Json

HOLD_BYTES = 48 * 1024 * 1024  # decoded rows of one file that wait until the file is known to be whole
READ_TRIES = 4
READ_BACKOFF_SECS = 0.1


class _FileFailedError(Exception):
    """A file that cannot be read; the message gives the reason."""


class _Decoders:
    """The decoders of a split. Files that another decoder reads continue with the columns found so far."""

    def __init__(self, schema: pa.Schema, columns: Columns) -> None:
        self.schema = schema
        self._columns = columns
        self._by_class: dict[type, RecordDecoder[Any]] = {}
        self._last: RecordDecoder[Any] | None = None

    def of(self, file_format: Format[Any]) -> RecordDecoder[Any]:
        """Return the decoder of a format, with the newest columns."""
        kind = file_format.decoder_class
        decoder = self._by_class.get(kind)
        if decoder is None:
            decoder = self._by_class[kind] = kind(self.schema, self._columns)
        elif decoder is not self._last:
            decoder.reset(self.schema)
        self._last = decoder
        return decoder

    def kinds(self) -> dict[str, dict[str, int]]:
        counts: Counts = {}
        for decoder in self._by_class.values():
            add_counts(counts, decoder.kinds())
        return {path: dict(counted) for path, counted in counts.items()}


class _RefusingDecoder(RecordDecoder[Any]):
    """Reports every record as bad, with its bytes and one reason. Learns no columns."""

    def __init__(self, file_format: Format[Any], schema: pa.Schema, reason: BadReason) -> None:
        self._reason = reason
        nowhere = pa.schema([pa.field(f"\0{uuid.uuid4().hex}", pa.string(), nullable=False)])  # no record has it
        self._inner = file_format.decoder_class(
            nowhere, Columns(nowhere, frozenset(nowhere.names), {}, evolution="rescue")
        )
        self._schema = schema

    @property
    def schema(self) -> pa.Schema:
        return self._schema

    def reset(self, schema: pa.Schema) -> None:
        self._schema = schema

    def decode(self, piece: Piece) -> Decoded:
        decoded = self._inner.decode(piece)
        lacking = "missing-required"
        return replace(
            decoded, bad=[replace(b, reason=self._reason) if b.reason == lacking else b for b in decoded.bad]
        )


class FileReader(SplitReader):
    """Reads the files of one split, one after the other."""

    def __init__(self, settings: dict[str, Json], split: Split, ports: Mapping[str, Columns]) -> None:
        self._settings = FileReaderSettings.from_json(settings)
        self._split = split
        self._columns = ports[MAIN_PORT]
        self._storage = open_storage(self._settings.root, self._settings.storage_options)
        self._failed: dict[str, str] = {}  # path -> reason; survives a restart

    def read(self, schemas: Mapping[str, pa.Schema], budget: Budget) -> Iterator[Sequence[Rows]]:
        self._outcomes: list[FileOutcome] = []
        self._decoders = _Decoders(schemas[MAIN_PORT], self._columns)
        for item in self._split.inputs:
            if budget.is_full:
                break
            path = str(item["path"])
            if "quarantine" in item and path not in self._failed:
                yield from self._read_quarantined(item, budget)
            elif path not in self._failed:
                yield from self._read_file(item, budget)
            if path in self._failed:
                self._outcomes.append(FileOutcome(path, failed=self._failed[path]))

    def end(self) -> SplitEnd:
        columns = ReadColumns(self._decoders.schema, dict(self._decoders.kinds()))
        failed = {outcome.path: outcome.failed for outcome in self._outcomes if outcome.failed is not None}
        return SplitEnd([outcome.to_json() for outcome in self._outcomes], {MAIN_PORT: columns}, failed)

    def _read_file(self, item: dict[str, Json], budget: Budget) -> Iterator[Sequence[Rows]]:
        """Read one file as far as the budget allows. A failure is recorded with its reason."""
        before, counted, read = self._decoders.schema, budget.records, budget.bytes_read
        waiting: list[Decoded] = []
        waiting_bytes, spilled = 0, False
        most = budget.records_left
        if "to" in item:  # as an earlier reading of it ended
            most = min(most, int(item["to"]) - int(item["from"]))
        file = _OpenFile(self._storage, self._settings, item, most, before.names)
        decoder = self._open_decoder(file.format, str(item["path"]))
        try:
            for piece in file.pieces():
                decoded = self._decode(item, decoder, piece, file)
                self._decoders.schema = decoder.schema
                budget.raw_bytes += piece.size_bytes
                budget.records += piece.records - (1 if file.incomplete_bytes else 0)
                budget.bytes_read += piece.consumed_bytes - file.consumed_bytes
                file.consumed_bytes = piece.consumed_bytes
                waiting.append(decoded)
                waiting_bytes += decoded.batch.nbytes
                if waiting_bytes > HOLD_BYTES:
                    yield self._rows(file.path, decoder, waiting, file.header)
                    waiting, waiting_bytes, spilled = [], 0, True
                if budget.is_full:
                    break
            outcome = file.outcome()
        except _FileFailedError as error:
            self._failed[item["path"]] = str(error)
            if spilled:
                raise RestartError from error
            decoder.reset(before)
            self._decoders.schema = before
            budget.records, budget.bytes_read = counted, read
            return
        finally:
            file.close()
        yield self._rows(file.path, decoder, waiting, file.header)
        self._outcomes.append(outcome)

    def _read_quarantined(self, item: dict[str, Json], budget: Budget) -> Iterator[Sequence[Rows]]:
        """Read quarantined records again. A failure is recorded with its reason: they stay where they are."""
        try:
            kept = load_quarantined(item, self._settings.root)
        except (OSError, pa.ArrowException, KeyError) as error:
            self._failed[str(item["path"])] = f"cannot be read: {error}"
            return
        has_rows = False
        try:
            for records in kept:
                decoder = self._open_decoder(NdjsonFormat(), records.file)
                for block in records.blocks(item.get("read_as", {}), self._settings.max_record_bytes):
                    try:
                        decoded = records.number(decoder.decode(block))
                    except (UnexpectedFieldError, MismatchError) as error:
                        raise SchemaError(f"{records.file}: {error}", file=records.file) from error
                    self._decoders.schema = decoder.schema
                    budget.records += block.records
                    budget.raw_bytes += len(block.data)
                    budget.bytes_read += len(block.data)
                    has_rows = True
                    yield self._rows(records.file, decoder, [decoded], records.header)
        except BrokenFileError as error:
            self._failed[str(item["path"])] = f"{records.file}: {error.reason}"
            if has_rows:
                raise RestartError from error
            return
        self._outcomes.append(FileOutcome(str(item["path"]), to=int(item["to"]), finished=True))

    def _open_decoder(self, file_format: Format[Any], path: str) -> RecordDecoder[Any]:
        """Return the decoder of a file's records, which are all bad if its folders lack a value that is needed."""
        reason = self._columns.find_refusal(folder_values(path, self._settings.root))
        if reason is not None:
            return _RefusingDecoder(file_format, self._decoders.schema, reason)
        return self._decoders.of(file_format)

    def _decode(self, item: dict[str, Json], decoder: RecordDecoder[Any], piece: Piece, file: _OpenFile) -> Decoded:
        try:
            decoded = decoder.decode(piece)
        except (UnexpectedFieldError, MismatchError) as error:
            raise SchemaError(f"{item['path']}: {error}", file=item["path"]) from error
        if decoded.bad and file.leaves_last_record(piece, decoded.bad[-1].record):
            decoded = replace(decoded, bad=decoded.bad[:-1])
        if decoded.bad and self._settings.on_bad_record == "fail":
            first = decoded.bad[0]
            raise BadRecordsError(f"{item['path']}, line {first.line}: {first.reason}", file=item["path"])
        return decoded

    def _rows(
        self, path: str, decoder: RecordDecoder[Any], waiting: Sequence[Decoded], header: bytes | None
    ) -> list[Rows]:
        constants = folder_values(path, self._settings.root)
        for decoded in waiting:
            if decoded.batch.num_rows:
                decoder.count(decoded.batch)
        return [
            Rows(
                path,
                d.batch,
                d.record_numbers,
                d.bad,
                constants,
                rescued=[replace(one, file=path) for one in d.rescued],
                header=header,
            )
            for d in waiting
        ]


class _OpenFile:
    """One file of the source, read from its last place; distinguishes faults of the file from those of the storage."""

    def __init__(self, storage: Storage, settings: FileReaderSettings, item: dict[str, Json], max_records: int,
        known: Collection[str],
    ) -> None:  # fmt: skip
        self._storage = storage
        self._known = known
        self._root = settings.root
        self._item = item
        self._place = Place(
            record=int(item["from"]),
            offset=int(item["offset"]),
            line=int(item["line"]),
            max_records=max_records,
            max_record_bytes=settings.max_record_bytes,
        )
        self.path = str(item["path"])
        self._key = self.path.removeprefix(settings.root).lstrip("/")
        self._file = StoredFile(storage, self._key, self.path, int(item["size_bytes"]))
        self._reader: RecordReader[Any] | None = None
        self.format: Format[Any] = open_format(item.get("read_as"))
        self._etag = str(item["etag"])
        self.consumed_bytes = 0
        self.incomplete_bytes = 0  # of a last record that is left, since it is incomplete

    def pieces(self) -> Iterator[Piece]:
        """Yield the file's records in pieces.

        Raises:
            _FileFailedError: the file itself is broken, missing, changed or forbidden.
            SourceError: the storage failed; the epoch is retried.
        """
        try:
            self._reader = self._open()
            yield from self._reader
        except BrokenFileError as error:
            raise _FileFailedError(error.reason) from error
        except FileNotFoundError as error:
            if is_gone(self._root):  # no fault of the file, which must not be set aside for it
                raise SourceError(f"the folder {self._root} is gone", path=self._root) from error
            raise _FileFailedError("missing") from error
        except PermissionError as error:
            raise _FileFailedError("permission denied") from error
        except OSError as error:
            raise SourceError(f"cannot read {self._item['path']}: {error}", file=self._item["path"]) from error

    def _open(self) -> RecordReader[Any]:
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

    def _open_once(self) -> RecordReader[Any]:
        stat = self._storage.stat(self._key)
        if stat.etag != self._item["etag"] and not self._has_grown(stat):
            raise BrokenFileError(self._item["path"], "changed after it was planned")
        self._etag = stat.etag
        reader = self.format.open(self._file, self._place)
        if not self._place.record and "to" not in self._item:  # a file that an epoch has read stays what it was
            self.format.check_names(self._file, reader, self._known)
        return reader

    def _has_grown(self, stat: FileStat) -> bool:
        """Return whether the records that an epoch read are still there. Only a repeated reading names their end."""
        growth = find_growth(self._storage, self._key, stat.size_bytes, ReadFile.of_record(self._item))
        return growth.change in (Change.GROWN, Change.BLANK)

    @property
    def header(self) -> bytes | None:
        """What a bad record needs beside its own bytes, to be decoded again."""
        return self.format.header_of(self._reader) if self._reader is not None else None

    def leaves_last_record(self, piece: Piece, bad_record: int) -> bool:
        """Return whether a bad record is the incomplete end of a growing file: it is left for later."""
        if self._item.get("hold"):
            self.incomplete_bytes = self.format.incomplete_bytes(self._file, piece, bad_record)
        return self.incomplete_bytes > 0

    def outcome(self) -> FileOutcome:
        """Return where reading ended. Raises _FileFailedError if the file changed meanwhile, so that its rows are
        mixed."""
        reader = self._reader
        assert reader is not None
        end = None
        try:
            end = self.format.end_of(self._file, reader, self.incomplete_bytes)
            etag = self._storage.stat(self._key).etag
        except FileNotFoundError:
            etag = self._etag  # deleted after it was opened: what was read is what it was
        except OSError as error:
            raise SourceError(f"cannot look at {self._item['path']}: {error}") from error
        if etag != self._etag:
            raise _FileFailedError("changed while it was read")
        return FileOutcome(
            path=str(self._item["path"]),
            to=reader.records_read - (1 if self.incomplete_bytes else 0),
            offset=self.format.offset_of(self._file, reader),
            line=reader.lines_read,
            finished=reader.finished,
            end=end.to_json() if end is not None else None,
        )

    def close(self) -> None:
        self._file.close()
