"""JSON files: one array of objects, one object over many lines, or objects one after the other."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from firnline.ndjson import Block
from firnline.ndjson.streams import BOM
from firnline.sources.files.formats.base import Place, RecordReader, StoredFile
from firnline.sources.files.formats.json_scan import ARRAY_FIRST, ARRAY_NEXT, SEQUENCE, scan_json, skip_json
from firnline.sources.files.formats.lines import TextFormat
from firnline.sources.files.formats.recognise import check_head
from firnline.sources.files.formats.scan_codes import CUT_LINE, MODE, TRAILING
from firnline.sources.files.formats.scanning import Array, ScanReader


class JsonFormat(TextFormat):
    """Top-level objects, in an array or not. A value that is no object is a bad record."""

    def open(self, file: StoredFile, place: Place) -> RecordReader[Block]:
        if place.offset and place.record == 0:
            place = replace(place, offset=0)
        if place.offset:
            first = file.head().removeprefix(BOM).lstrip()[:1]
            if not first:  # the file begins with more blanks than one looks at
                place = replace(place, offset=0)
        reader = _JsonReader(file, place)
        if place.offset:
            reader.resume(is_array=first == b"[")
        else:
            check_head(reader.head(), file.path, "json")
        reader.start()
        return reader


class _JsonReader(ScanReader):
    def resume(self, is_array: bool) -> None:
        """Continue after a value."""
        self._control[MODE] = ARRAY_NEXT if is_array else SEQUENCE

    def _scan(self, data: Array, at: int, max_records: int) -> tuple[int, int, int, int]:
        if self._out.size < data.size - at + max_records + 16:
            self._out = np.empty(data.size - at + max_records + 16, np.uint8)
        end, size, records, why = scan_json(
            data, at, data.size, self._ended, max_records, self._place.max_record_bytes, self._out, self._rows,
            self._control,
        )  # fmt: skip
        return end, size, records, why

    def _skip(self, data: Array, at: int) -> tuple[int, bool]:
        end, ended = skip_json(data, at, data.size, self._control)
        return int(end), bool(ended)

    def _broken(self, why: int) -> str:
        line = int(self._control[CUT_LINE])
        if why == TRAILING:
            return f"has more after the end of its array, at line {line}"
        if self._control[MODE] in (ARRAY_FIRST, ARRAY_NEXT):
            return f"the JSON array ends in the middle, at line {line}"
        return f"the JSON object that starts at line {line} has no end"
