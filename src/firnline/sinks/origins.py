"""Where the rows of a staged file come from: runs of rows with consecutive record numbers in one input.

The ledger keeps them with the file's description, so that a row can be traced after the file is gone.
"""

from __future__ import annotations

import base64
from collections.abc import Mapping

import numpy as np
import pyarrow as pa
import zstandard

from firnline.types import Json

ORIGINS = "origins"  # in the description of a staged file


class Origins:
    """Gathers the origins of the rows of one file, in the order of the rows."""

    def __init__(self) -> None:
        self._inputs: dict[str, int] = {}
        self._runs: list[np.ndarray] = []

    def add(self, origin: str, numbers: pa.Array) -> None:
        """Add rows of one input, with their record numbers."""
        if not len(numbers):
            return
        records = numbers.to_numpy(zero_copy_only=False).astype(np.int64, copy=False)
        starts = np.concatenate([[0], np.flatnonzero(np.diff(records) != 1) + 1])
        lengths = np.diff(np.append(starts, len(records)))
        place = self._inputs.setdefault(origin, len(self._inputs))
        self._runs.append(np.stack([np.full(len(starts), place), records[starts], lengths]).astype(np.int64))

    def to_json(self) -> dict[str, Json]:
        """Return the durable form: the inputs, and the runs (input, first record, rows) as compressed differences."""
        runs = np.concatenate(self._runs, axis=1) if self._runs else np.empty((3, 0), np.int64)
        data = np.diff(runs, axis=1, prepend=0).astype("<i8").tobytes()
        return {"inputs": list(self._inputs), "runs": base64.b64encode(zstandard.compress(data)).decode()}


def find_origin(origins: Mapping[str, Json], row: int) -> tuple[str, int]:
    """Return input and record number of a row of the file, counted from 0.

    Raises:
        IndexError: the file has no such row.
    """
    data = zstandard.decompress(base64.b64decode(origins["runs"]))
    inputs, firsts, lengths = np.frombuffer(data, "<i8").reshape(3, -1).cumsum(axis=1)
    ends = np.cumsum(lengths)
    run = int(np.searchsorted(ends, row, side="right"))
    if row < 0 or run >= len(ends):
        raise IndexError(row)
    return str(origins["inputs"][inputs[run]]), int(firsts[run] + row - (ends[run] - lengths[run]))
