"""Stages bad records: raw bytes, file, line and reason. They become true once a commit's ledger entry names the
file."""

from __future__ import annotations

import uuid
from collections import Counter
from collections.abc import Sequence

import pyarrow as pa
import pyarrow.parquet as pq

from firnline.faults import fault_point
from firnline.names import quarantine_name
from firnline.sources.base import BadRecord
from firnline.storage import open_storage
from firnline.types import Json

FLUSH_BYTES = 32 * 1024 * 1024
SCHEMA = pa.schema(
    [
        ("file", pa.string()),
        ("line", pa.int64()),
        ("record", pa.int64()),
        ("reason", pa.string()),
        ("raw", pa.binary()),
        ("epoch", pa.int64()),
    ]
)


class QuarantineWriter:
    """Collects the bad records of one task. `target` is `{root, storage_options, folder}`."""

    def __init__(self, target: dict[str, Json], epoch: int, attempt: str) -> None:
        self._storage = open_storage(target["root"], target["storage_options"])
        self._folder = target["folder"]
        self._epoch = epoch
        self._attempt = attempt
        self._rows: list[dict[str, Json]] = []
        self._size_bytes = 0
        self._files: list[dict[str, Json]] = []

    def add(self, path: str, records: Sequence[BadRecord]) -> None:
        """Add the bad records of one file."""
        for bad in records:
            self._rows.append(
                {
                    "file": path,
                    "line": bad.line,
                    "record": bad.record,
                    "reason": bad.reason,
                    "raw": bytes(bad.raw),
                    "epoch": self._epoch,
                }
            )
            self._size_bytes += len(bad.raw) + 64
        if self._size_bytes > FLUSH_BYTES:
            self._flush()

    def close(self) -> list[dict[str, Json]]:
        """Make everything durable and return the files."""
        self._flush()
        return self._files

    def discard(self) -> None:
        """Delete the files of this writer."""
        for file in self._files:
            self._storage.delete(f"{self._folder}/{file['name']}")
        self._files, self._rows = [], []

    def _flush(self) -> None:
        if not self._rows:
            return
        name = quarantine_name(self._epoch, self._attempt, uuid.uuid4().hex)
        sink = pa.BufferOutputStream()
        pq.write_table(pa.Table.from_pylist(self._rows, schema=SCHEMA), sink, compression="zstd")
        fault_point("stage.quarantine.before")
        self._storage.put(f"{self._folder}/{name}", sink.getvalue().to_pybytes())
        fault_point("stage.quarantine.after")
        reasons = Counter(str(row["reason"]) for row in self._rows)
        self._files.append({"name": name, "rows": len(self._rows), "reasons": dict(reasons)})
        self._rows, self._size_bytes = [], 0
