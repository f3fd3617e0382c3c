"""CSV files, as RFC 4180 describes them: quoted fields may hold line breaks, and two quotes stand for one."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from firnline.ndjson import Block, BrokenFileError, Origins, Refused, compression_of
from firnline.sources.files.formats.base import Place, QuarantinedRecord, RecordReader, StoredFile
from firnline.sources.files.formats.csv_scan import BOOLEAN, INFERRED, NUMBER, scan_csv, skip_csv
from firnline.sources.files.formats.lines import OneFile, TextFormat
from firnline.sources.files.formats.recognise import check_delimiter, check_head, find_data, find_record, no_header
from firnline.sources.files.formats.scan_codes import CUT, CUT_LINE, LINE, ROW_REASON
from firnline.sources.files.formats.scanning import BLOCK_BYTES, Array, ScanReader
from firnline.sources.files.options import CsvOptions
from firnline.types import Json

_NO_QUOTE = 256  # no byte
_LINE_END = b"\r\n"  # after a record alone: one that ends with a carriage return keeps it
_MAX_ALONE = 8192  # records of a block that are scanned alone
_ALONE_SLACK = 256


@dataclass(frozen=True, slots=True)
class _Declared:
    """What the spec declares: names for files without a header, and columns of numbers and booleans."""

    names: list[str]
    how: dict[str, int]


class CsvFormat(TextFormat):
    """Records with the names of their fields in the header, or numbered."""

    sample = b"a\nb\n"

    def __init__(self, read_as: Mapping[str, Json]) -> None:
        self._options = CsvOptions.from_json(read_as)
        self._declared = _Declared(
            [str(name) for name in read_as.get("names", ())],
            {
                **{str(name): NUMBER for name in read_as.get("numbers", ())},
                **{str(name): BOOLEAN for name in read_as.get("booleans", ())},
            },
        )

    def open(self, file: StoredFile, place: Place) -> RecordReader[Block]:
        if not place.offset:
            reader = _CsvReader(file, place, self._options, self._declared)
            head = reader.head()
            check_head(head, file.path, "csv")
            reader.read_names()
            if self._options.header and len(reader.names) == 1 and not place.record:
                check_delimiter(head, file.path, self._options.delimiter)
            reader.seen = head
        else:
            first = _CsvReader(file, Place(max_record_bytes=place.max_record_bytes), self._options, self._declared)
            first.read_names()
            reader = _CsvReader(file, place, self._options, self._declared)
            reader.set_names(first.names)
            reader.header = first.header
        reader.start()
        return reader

    def check_names(self, file: StoredFile, reader: RecordReader[Block], known: Collection[str]) -> None:
        options = self._options
        if not isinstance(reader, _CsvReader) or not options.header or not options.check_header:
            return
        is_other = bool(known) and set(reader.names).isdisjoint(known)
        odd = find_data(reader.names) if is_other else find_record(reader.seen, options.delimiter, options.quote)
        if odd is not None:
            raise BrokenFileError(file.path, no_header(odd))

    def header_of(self, reader: RecordReader[Block]) -> bytes | None:
        return reader.header if isinstance(reader, _CsvReader) else None

    def scan_alone(self, records: Sequence[QuarantinedRecord], header: bytes) -> Iterator[Block]:
        """Yield records of one file as blocks, each scanned alone: no quote in one reaches into the next.

        `header` is the first record of the file. Records are numbered from 0, lines and bytes are those of the records.

        Raises:
            BrokenFileError: the header gives no names to the columns.
        """
        options = replace(self._options, encoding="utf-8")  # quarantined bytes are UTF-8, whatever the file was
        storage: Any = OneFile(header)
        reader = _CsvReader(
            StoredFile(storage, "", "", len(header)), Place(max_record_bytes=len(header)), options, self._declared
        )
        reader.read_names()
        ends = np.cumsum([len(record.raw) for record in records])
        at = 0
        while at < len(records):
            within = int(np.searchsorted(ends, (ends[at - 1] if at else 0) + BLOCK_BYTES, "right"))
            end = min(max(within, at + 1), at + _MAX_ALONE)
            yield reader.scan_alone(records[at:end], at)
            at = end

    def offset_of(self, file: StoredFile, reader: RecordReader[Block]) -> int:
        if compression_of(file.path) or self._options.encoding != "utf-8":
            return 0  # offsets would be those of the unpacked, converted text
        return reader.end_offset


class _CsvReader(ScanReader):
    reasons = ("", "wrong-field-count", "stray-quote")

    def __init__(self, file: StoredFile, place: Place, options: CsvOptions, declared: _Declared) -> None:
        super().__init__(file, place, options.encoding)
        self._options = options
        self._declared = declared
        self._delimiter = ord(options.delimiter)
        self._quote = ord(options.quote) if options.quote else _NO_QUOTE
        nulls = [text.encode() for text in options.null_values]
        self._nulls, self._null_ends = _joined(nulls)
        self.names: list[str] = []
        self.header: bytes | None = None  # the first record, with its line end
        self.seen = b""  # the first bytes of the file, if it is read from its beginning

    # --- names -----------------------------------------------------------------------------------------

    def read_names(self) -> None:
        """Read the header, or count the fields of the first record.

        Raises:
            BrokenFileError: there is no header, or it cannot give names to columns.
        """
        self.set_names([])
        if not self._has_more():
            self.set_names([])
            return
        first = self._first_record()
        if not self._options.header:
            given = self._declared.names[: len(first)]
            self.set_names([*given, *(f"column{number}" for number in range(len(given), len(first)))])
            return
        seen: set[str] = set()
        for number, name in enumerate(first, 1):
            if not name.strip():
                raise BrokenFileError(self._path, f"its header has no name for column {number} of {len(first)}")
            if name in seen:
                raise BrokenFileError(self._path, f'its header has the name "{name}" twice')
            seen.add(name)
        self.set_names(first)

    def set_names(self, names: list[str]) -> None:
        self.names = names
        keys = [json.dumps(name, ensure_ascii=False).encode() + b":" for name in names]
        self._keys, self._key_ends = _joined(keys)
        self._how = np.array([self._declared.how.get(name, INFERRED) for name in names], np.int64)

    def _first_record(self) -> list[str]:
        """Return the fields of the first record; a header is passed over."""
        while True:
            lines = _Lines(self._data[self._at :], self._ended)
            try:
                fields = next(self._parser(lines), [])
                problem = ""
            except UnicodeDecodeError:
                problem = "its first line is not UTF-8: set csv: {encoding: ...}"
            except csv.Error as error:
                problem = f"its first line is no CSV: {error}"
            if not lines.ran_out:
                break
            if len(self._data) - self._at > self._place.max_record_bytes:
                raise BrokenFileError(self._path, "its first line is too long")
            self._read_more(len(self._data) - self._at + 1)
        if problem:
            raise BrokenFileError(self._path, problem)
        self.header = bytes(self._data[self._at : self._at + lines.size])
        if self._options.header:
            self._pass_bytes(self._at + lines.size)
            self._control[LINE] += lines.count
        return fields

    def _parser(self, lines: Iterator[str]) -> Iterator[list[str]]:
        delimiter, quote = self._options.delimiter, self._options.quote
        if not quote:
            return csv.reader(lines, delimiter=delimiter, quoting=csv.QUOTE_NONE, strict=True)
        return csv.reader(lines, delimiter=delimiter, quotechar=quote, strict=True)

    # --- records ---------------------------------------------------------------------------------------

    def scan_alone(self, records: Sequence[QuarantinedRecord], first: int) -> Block:
        """Return a block of records, each scanned alone; `first` is the number of the first one."""
        source = b"".join(record.raw + _LINE_END for record in records)
        data = np.frombuffer(source, np.uint8)
        data.flags.writeable = False
        sizes = np.array([len(record.raw) for record in records], np.int64)
        starts = np.cumsum(sizes + len(_LINE_END)) - sizes - len(_LINE_END)
        # A byte becomes six at most; each column has a name, two quotes and a comma.
        most = 6 * sizes + self._keys.size + 3 * len(self.names) + _ALONE_SLACK
        out = np.empty(int(most.sum()), np.uint8)
        rows = np.zeros((2, 4), np.int64)
        used, kept, refused = 0, list[int](), list[Refused]()
        for number, record in enumerate(records):
            reason = self._refusal(record)
            if not reason:
                start = int(starts[number])
                after = start + int(sizes[number]) + len(_LINE_END)
                self._control[:] = 0
                end, size, count, why = scan_csv(
                    data, start, after, True, 2, after - start, out[used:], rows,
                    self._control, self._keys, self._key_ends, self._how, self._nulls, self._null_ends,
                    self._delimiter, self._quote,
                )  # fmt: skip
                if count == 1 and end == after:
                    reason = self.reasons[int(rows[0, ROW_REASON])]
                else:  # a field that never ends, or several records
                    reason = "stray-quote" if why == CUT else "wrong-field-count"
            if reason:
                refused.append(Refused(first + number, record.line, record.raw, reason))
            else:
                used += int(size)
                kept.append(number)
        lines = np.array([records[number].line for number in kept], np.int64)
        return Block(
            data=out[:used].tobytes(), first_record=first, first_line=1, records=len(records), lines=len(records),
            end_offset=0, consumed_bytes=0, refused=refused,
            origins=Origins(source, lines, starts[kept], starts[kept] + sizes[kept]),
        )  # fmt: skip

    def _refusal(self, record: QuarantinedRecord) -> str:
        """Return the reason why a record stays bad, whatever its bytes are: it is cut, or it is the header today."""
        is_header = self._options.header and record.record == 0 and record.raw == (self.header or b"").rstrip(b"\r\n")
        return record.reason if record.reason == "too-long" or is_header else ""

    def _scan(self, data: Array, at: int, max_records: int) -> tuple[int, int, int, int]:
        end, size, records, why = scan_csv(
            data, at, data.size, self._ended, max_records, self._place.max_record_bytes, self._out, self._rows,
            self._control, self._keys, self._key_ends, self._how, self._nulls, self._null_ends,
            self._delimiter, self._quote,
        )  # fmt: skip
        return end, size, records, why

    def _skip(self, data: Array, at: int) -> tuple[int, bool]:
        end, ended = skip_csv(data, at, data.size, self._ended, self._control, self._delimiter, self._quote)
        return int(end), bool(ended)

    def _broken(self, why: int) -> str:
        return f"ends inside a quoted field of the record that starts at line {int(self._control[CUT_LINE])}"


class _Lines(Iterator[str]):
    """Lines of a buffer; `ran_out` if the last one may go on beyond it."""

    def __init__(self, data: bytes, is_end: bool) -> None:
        self._stream = io.BytesIO(data)
        self._is_end = is_end
        self.ran_out = False
        self.size = 0
        self.count = 0

    def __next__(self) -> str:
        line = self._stream.readline()
        if not line.endswith(b"\n"):
            self.ran_out = not self._is_end
            if not line:
                raise StopIteration
        self.size += len(line)
        self.count += line.endswith(b"\n")
        return line.decode()


def _joined(texts: Sequence[bytes]) -> tuple[Array, Array]:
    """Return texts one after the other, and where each ends."""
    ends = np.cumsum([len(text) for text in texts], dtype=np.int64)
    return np.frombuffer(b"".join(texts) + b"\0", np.uint8), ends
