"""The passes over a block in plain Python, for as long as their compiled forms are not there yet.

They leave every record to the exact path, which gives the same rows as the compiled kernel, more slowly.
"""

from __future__ import annotations

import pyarrow as pa

from firnline.ndjson import kernel as k
from firnline.ndjson.exact import is_timestamp
from firnline.ndjson.layout import Array
from firnline.ndjson.text import ODD

BLANKS = b" \t\r"


def scan(data: Array, odd: Array, control: Array) -> int:
    """Do what `kernel.scan` does if every record is odd."""
    text = data.tobytes()
    position, record, line, odds = (int(control[n]) for n in (k.POSITION, k.RECORD, k.LINE, k.ODD_COUNT))
    status = 0
    while position < len(text):
        end = text.index(b"\n", position)
        if text[position:end].strip(BLANKS):
            if odds >= odd.shape[0]:
                status = ODD
                break
            odd[odds, k.ODD_START], odd[odds, k.ODD_END], odd[odds, k.ODD_ROW] = position, end, 0
            odd[odds, k.ODD_RECORD], odd[odds, k.ODD_LINE] = record, line
            odds += 1
            record += 1
        line += 1
        position = end + 1
    control[k.POSITION], control[k.RECORD], control[k.LINE], control[k.ODD_COUNT] = position, record, line, odds
    return status


def count_timestamps(texts: pa.Array, quotes: int) -> int:
    """Do what `kernel.count_timestamps` does."""
    return sum(is_timestamp(text[quotes : len(text) - quotes]) for text in texts.to_pylist())
