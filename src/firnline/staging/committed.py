"""Which foreign units the log proves committed: the `firnline-unit:` transactions, followed from commit to commit."""

from __future__ import annotations

import json
from collections.abc import Iterable

import pyarrow as pa
import pyarrow.parquet as pq

from firnline.sinks.delta.log import DeltaLog
from firnline.storage import Storage

PREFIX = "firnline-unit:"


class CommittedUnits:
    """A set that follows the log. Its size follows the transactions that the log itself still holds."""

    def __init__(self, storage: Storage) -> None:
        self._storage = storage
        self._log = DeltaLog(storage)
        self._units: set[str] = set()
        self._version: int | None = None

    def follow(self, version: int) -> None:
        """Take in every commit up to `version`."""
        if self._version is None:
            self._version = self._read_checkpoint()
        for number in range(self._version + 1, version + 1):
            commit = self._log.read(number)
            if commit is None:  # cleaned up behind us: the newest checkpoint has what it held
                self._read_checkpoint()
                continue
            self._add(str(txn["appId"]) for txn in commit.txns())
        self._version = version

    def __contains__(self, name: str) -> bool:
        return name in self._units

    def _add(self, app_ids: Iterable[str]) -> None:
        for app_id in app_ids:
            if app_id.startswith(PREFIX):
                self._units.add(app_id.removeprefix(PREFIX))

    def _read_checkpoint(self) -> int:
        """Take in Delta's newest checkpoint; returns its version, -1 when there is none."""
        try:
            last = json.loads(self._storage.get("_delta_log/_last_checkpoint"))
        except FileNotFoundError:
            return -1
        version, parts = int(last["version"]), last.get("parts")
        stem = f"_delta_log/{version:020d}.checkpoint"
        names = [f"{stem}.{n + 1:010d}.{parts:010d}.parquet" for n in range(parts)] if parts else [f"{stem}.parquet"]
        for name in names:
            table = pq.read_table(pa.BufferReader(self._storage.get(name)), columns=["txn.appId"])
            self._add(row["appId"] for row in table.column("txn").to_pylist() if row and row["appId"])
        return version
