"""Rows of an epoch as batches: what one request carries, encoded column by column."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from firnline.sinks.dead_letters import DeadLetter
from firnline.sinks.encoding import encode_rows
from firnline.sinks.follower import EpochRows
from firnline.sinks.shaping import ShapedRows

ID_FIELD = "_firnline_id"
READ_ROWS = 10_000  # encoded at a time
CONTENT_TYPES = {"ndjson": "application/x-ndjson", "json": "application/json"}


@dataclass(slots=True)
class Batch:
    """The rows from the number `first` up to, but without, the number `end`; a condition may have left some out."""

    first: int
    end: int = 0
    parts: list[tuple[pa.Array, pa.Array]] = field(default_factory=list)  # numbers, and JSON objects
    rows: int = 0
    size_bytes: int = 0

    def add(self, numbers: pa.Array, objects: pa.Array, size_bytes: int) -> None:
        """Add rows."""
        self.parts.append((numbers, objects))
        self.rows += len(objects)
        self.size_bytes += size_bytes

    def body(self, style: str) -> bytes:
        """Return the body of a request: an object per line, or one array."""
        separator = "\n" if style == "ndjson" else ","
        joined = separator.join(_join(objects, separator) for _, objects in self.parts)
        return (f"{joined}\n" if style == "ndjson" else f"[{joined}]").encode()

    def letters(self, reason: str) -> list[DeadLetter]:
        """Return all rows as dead letters."""
        return [
            DeadLetter(number, reason, json.loads(text))
            for numbers, objects in self.parts
            for number, text in zip(numbers.to_pylist(), objects.to_pylist(), strict=True)
        ]


def cut_batches(rows: EpochRows, first: int, *, event_id: bool, max_rows: int, max_bytes: int) -> Iterator[Batch]:
    """Yield the rows from a number on, in batches of at most this size; a row that is larger goes alone.

    Together the batches cover every row number; the last one may have no rows.

    Raises:
        DamagedError: a file of the outbox is missing or damaged.
    """
    batch = Batch(first)
    for shaped in rows.read(first, READ_ROWS):
        objects = _objects(shaped, rows, event_id)
        edges = np.concatenate([[0], np.cumsum(_sizes(objects))])
        at = 0
        while at < len(objects):
            fitting = int(np.searchsorted(edges, edges[at] + max_bytes - batch.size_bytes, side="right")) - 1
            until = min(fitting, at + max_rows - batch.rows, len(objects))
            if until <= at and batch.rows:
                batch.end = shaped.numbers[at].as_py()
                yield batch
                batch = Batch(batch.end)
                continue
            until = max(until, at + 1)
            batch.add(
                shaped.numbers.slice(at, until - at), objects.slice(at, until - at), int(edges[until] - edges[at])
            )
            at = until
        batch.end = shaped.end
    if batch.end > batch.first:
        yield batch


def same_batch(rows: EpochRows, first: int, last: int, *, event_id: bool) -> Batch:
    """Return the batch of exactly these row numbers, whatever its size."""
    batch = Batch(first, last + 1)
    for shaped in rows.read(first, READ_ROWS):
        inside = pc.less_equal(shaped.numbers, last)
        objects = _objects(shaped, rows, event_id).filter(inside)
        batch.add(shaped.numbers.filter(inside), objects, int(_sizes(objects).sum()))
        if shaped.end > last:
            break
    return batch


def _objects(shaped: ShapedRows, rows: EpochRows, event_id: bool) -> pa.Array:
    batch = shaped.batch
    if event_id:
        batch = batch.append_column(ID_FIELD, rows.event_ids(shaped.numbers))
    return encode_rows(batch)


def _sizes(objects: pa.Array) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
    """Return the bytes of each object, with what separates it from the next."""
    found: Sequence[int] = pc.binary_length(objects).to_numpy(zero_copy_only=False)
    return np.asarray(found, np.int64) + 1


def _join(objects: pa.Array, separator: str) -> str:
    lists = pa.LargeListArray.from_arrays(pa.array([0, len(objects)], pa.int64()), objects)
    text: str = pc.binary_join(lists, pa.scalar(separator, pa.large_string()))[0].as_py()
    return text
