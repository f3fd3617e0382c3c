"""Values of messages as a block of lines: each value becomes one line, whatever it holds."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from firnline.ndjson.reader import Block, Origins, Refused

_OPEN = ord("{")
_BLANKS = b" \t\r\n"


def join_values(values: Sequence[bytes], numbers: np.ndarray[Any, Any]) -> Block:
    """Return a block with one record per value; record numbers count from 0, and `numbers` stand for lines.

    A line feed can stand in a value only between tokens, where a carriage return means the same; inside a string both
    are errors. An empty value, or one of blanks alone, is refused.
    """
    count = len(values)
    data = b"\n".join(values)
    lengths = np.fromiter(map(len, values), np.int64, count)
    ends = np.cumsum(lengths + 1) - 1
    starts = ends - lengths
    source, refused = data, list[Refused]()
    if count and not _is_plain(data, starts, lengths):
        blank = [index for index, value in enumerate(values) if not value.strip(_BLANKS)]
        refused = [Refused(index, int(numbers[index]), values[index], "not-json") for index in blank]
        kept = np.ones(count, np.bool_)
        kept[blank] = False
        data = b"\n".join([value.replace(b"\n", b"\r") for value, keep in zip(values, kept, strict=True) if keep])
        numbers, starts, ends = numbers[kept], starts[kept], ends[kept]
    return Block(
        data=data,
        first_record=0,
        first_line=1,
        records=count,
        lines=count,
        end_offset=len(source),
        consumed_bytes=len(source),
        refused=refused,
        origins=Origins(source, numbers, starts, ends),
    )


def _is_plain(data: bytes, starts: np.ndarray[Any, Any], lengths: np.ndarray[Any, Any]) -> bool:
    """Return whether every value is one line that begins like an object, so that none is blank."""
    if int(lengths.min()) == 0 or data.count(b"\n") != len(lengths) - 1:
        return False
    return bool((np.frombuffer(data, np.uint8)[starts] == _OPEN).all())
