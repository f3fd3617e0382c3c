"""Quarantined records that are read again: their raw bytes, decoded as lines, with their old file and number."""

from __future__ import annotations

import io
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from firnline.ndjson import Block, Decoded, open_blocks
from firnline.sources.files.position import current_name
from firnline.storage import open_storage
from firnline.types import Json

_STRING_OR_BREAK = re.compile(rb'"(?:\\.|[^"\\])*"?|[\r\n]', re.DOTALL)
_FORBIDDEN = bytes.maketrans(b"\r\n", b"\x0b\x0b")  # a line break inside a string stays what it is: not JSON
_BLANK = b"\0"  # stands for a record of blanks, which a reader of lines would pass over


@dataclass(frozen=True, slots=True)
class QuarantinedRecords:
    """Records of one file, in the order of the quarantine."""

    file: str
    lines: list[int]
    records: list[int]
    raws: list[bytes]

    def blocks(self, max_record_bytes: int) -> Iterator[Block]:
        """Yield the records as lines of a file that has nothing else."""
        texts = (_one_line(raw) for raw in self.raws)
        data = b"\n".join(text if text.strip() else _BLANK for text in texts)
        most = max(max_record_bytes, max(map(len, self.raws)) + 1)
        return iter(open_blocks(io.BytesIO(data), path=self.file, compression=None, max_record_bytes=most))

    def number(self, decoded: Decoded) -> Decoded:
        """Give rows and bad records the numbers that they have in their file."""
        numbers = np.array(self.records, np.int64)[decoded.record_numbers.to_numpy()]
        bad = [
            replace(b, record=self.records[b.record], line=self.lines[b.record], raw=self.raws[b.record])
            for b in decoded.bad
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
    columns = [table.column(name).to_pylist() for name in ("file", "line", "record", "raw")]
    former_roots = item.get("former_roots", ())
    for name, line, record, raw in zip(*columns, strict=True):
        file = current_name(name, former_roots, root)
        if not groups or groups[-1].file != file:
            groups.append(QuarantinedRecords(file, [], [], []))
        groups[-1].lines.append(line)
        groups[-1].records.append(record)
        groups[-1].raws.append(raw)
    return groups
