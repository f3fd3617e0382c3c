"""Quarantined records that are read again: their raw bytes, decoded alone, with their old file and number."""

from __future__ import annotations

import io
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from firnline.ndjson import Block, BrokenFileError, Decoded, Origins, open_blocks
from firnline.sources.files.formats.base import QuarantinedRecord
from firnline.sources.files.position import current_name
from firnline.sources.headers import find_headers
from firnline.storage import open_storage
from firnline.types import Json

_STRING_OR_BREAK = re.compile(rb'"(?:\\.|[^"\\])*"?|[\r\n]', re.DOTALL)
_FORBIDDEN = bytes.maketrans(b"\r\n", b"\x0b\x0b")  # a line break inside a string stays what it is: not JSON
_BLANK = b"\0"  # stands for a record of blanks, which a reader of lines would pass over


@dataclass(frozen=True, slots=True)
class QuarantinedRecords:
    """Records of one file, in the order of the quarantine."""

    file: str
    header: bytes | None  # the first record of a CSV file
    records: list[QuarantinedRecord] = field(default_factory=list)

    def blocks(self, read_as: Mapping[str, Json], max_record_bytes: int) -> Iterator[Block]:
        """Yield the records in a format, without the rest of their file.

        Raises:
            BrokenFileError: a record alone has no columns in this format.
        """
        name = read_as.get("format")
        if name == "csv":
            yield from self._csv_blocks(read_as)
        elif name == "parquet":
            raise BrokenFileError(self.file, "a row of a Parquet file is not decoded alone")
        else:
            yield from self._line_blocks(max_record_bytes)

    def _line_blocks(self, max_record_bytes: int) -> Iterator[Block]:
        """Yield the records as lines of a file that has nothing else."""
        texts = (_one_line(one.raw) for one in self.records)
        data = b"\n".join(text if text.strip() else _BLANK for text in texts)
        most = max(max_record_bytes, max(len(one.raw) for one in self.records) + 1)
        for block in open_blocks(io.BytesIO(data), path=self.file, compression=None, max_record_bytes=most):
            lines = np.array([one.line for one in self.records[block.first_record : block.end_record]], np.int64)
            nowhere = np.zeros(len(lines), np.int64)  # `number` gives bad records their bytes
            yield replace(block, origins=Origins(b"", lines, nowhere, nowhere))

    def _csv_blocks(self, read_as: Mapping[str, Json]) -> Iterator[Block]:
        from firnline.sources.files.formats.csv_records import CsvFormat

        if self.header is None:
            raise BrokenFileError(self.file, "its header is not in the quarantine")
        yield from CsvFormat(read_as).scan_alone(self.records, self.header)

    def number(self, decoded: Decoded) -> Decoded:
        """Give rows and bad records the numbers that they have in their file."""
        numbers = np.array([one.record for one in self.records], np.int64)[decoded.record_numbers.to_numpy()]
        former = [self.records[bad.record] for bad in decoded.bad]
        bad = [
            replace(bad, record=one.record, line=one.line, raw=one.raw)
            for bad, one in zip(decoded.bad, former, strict=True)
        ]
        return replace(decoded, record_numbers=pa.array(numbers), bad=bad)


def _one_line(raw: bytes) -> bytes:
    """Return a record as one line: line breaks between its values become blanks."""
    if b"\n" not in raw and b"\r" not in raw:
        return raw
    return _STRING_OR_BREAK.sub(lambda m: b" " if m[0] in b"\r\n" else m[0].translate(_FORBIDDEN), raw)


def load_quarantined(item: Mapping[str, Json], root: str) -> list[QuarantinedRecords]:
    """Load the records that an input of a plan names, by file under its current name. `root` is the source's.

    Raises:
        OSError, pa.ArrowException: the file of the quarantine cannot be read.
    """
    at = item["at"]
    storage = open_storage(at["root"], at["storage_options"])
    data = storage.get(f"{at['folder']}/{item['quarantine']}")
    table = pq.read_table(pa.BufferReader(data))
    chosen = np.concatenate([np.arange(first, last + 1) for first, last in item["rows"]])
    table = table.take(pa.array(chosen))
    groups: list[QuarantinedRecords] = []
    headers = find_headers(table.schema)
    columns = [table.column(name).to_pylist() for name in ("file", "line", "record", "reason", "raw")]
    former_roots = item.get("former_roots", ())
    for name, line, record, reason, raw in zip(*columns, strict=True):
        file = current_name(name, former_roots, root)
        if not groups or groups[-1].file != file:
            groups.append(QuarantinedRecords(file, headers.get(name)))
        groups[-1].records.append(QuarantinedRecord(line, record, reason, raw))
    return groups
