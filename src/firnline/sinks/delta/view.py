"""The checkpoints that a Delta table's log holds, seen as a checkpoint store. Writes nothing.

One version per commit of the pipeline that carries a checkpoint, numbered as the table is, as far back as the log has
not been cleaned up. The table itself changes these: by commits, and by `firnline rollback`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import ClassVar, NoReturn

from firnline.errors import StoreReadOnlyError
from firnline.names import DELTA_LOG, epoch_txn
from firnline.sinks.delta.log import DeltaLog, LogCommit
from firnline.storage import Storage
from firnline.stores.base import PAGE, CheckpointStore, VersionInfo, check_key
from firnline.stores.payload import encode
from firnline.stores.record import CheckpointRecord
from firnline.types import Json


class DeltaLogStore(CheckpointStore):
    """The checkpoints of `pipeline` in the table whose root is `storage`."""

    kind: ClassVar[str] = "delta"
    writable: ClassVar[bool] = False

    def __init__(self, storage: Storage, pipeline: str, *, sink: str = "delta") -> None:
        super().__init__(held_by=sink)
        self._storage = storage
        self._log = DeltaLog(storage)
        self._pipeline = check_key(pipeline)

    @property
    def place(self) -> str:
        return f"{self._storage.root}/{DELTA_LOG}"

    def open(self) -> None:
        self._log.newest_version()

    def get_raw(self, key: str) -> bytes | None:
        return next((data for _, data in self._found(key)), None)

    def list(self, prefix: str = "") -> Iterator[str]:
        if self._pipeline.startswith(prefix) and self.latest_version(self._pipeline):
            yield self._pipeline

    def latest_version(self, key: str) -> int:
        return next((info.version for info, _ in self._found(key)), 0)

    def get_version_raw(self, key: str, version: int) -> bytes | None:
        if check_key(key) != self._pipeline or version < 0:
            return None
        commit = self._log.read(version)
        found = _checkpoint_of(commit, self._pipeline) if commit else None
        return found[1] if found else None

    def list_versions(self, key: str, *, before: int | None = None, limit: int = PAGE) -> Sequence[VersionInfo]:
        infos: list[VersionInfo] = []
        if limit < 1:
            return infos
        for info, _ in self._found(key, before):
            infos.append(info)
            if len(infos) == limit:
                break
        return infos

    def put_raw(self, key: str, data: bytes, note: str = "") -> int:
        self._refuse()

    def put_raw_versioned(self, key: str, data: bytes, expected: int, note: str = "") -> int:
        self._refuse()

    def delete(self, key: str) -> bool:
        self._refuse()

    def prune(self, key: str, keep: int) -> int:
        self._refuse()

    def rollback(self, key: str, version: int, note: str = "") -> int:
        self._refuse()

    def _refuse(self) -> NoReturn:
        raise StoreReadOnlyError(f"the log of {self._storage.root} is only shown here; its commits are what it holds")

    def _found(self, key: str, before: int | None = None) -> Iterator[tuple[VersionInfo, bytes]]:
        """This pipeline's commits with a checkpoint, newest first."""
        if check_key(key) != self._pipeline:
            return
        newest = self._log.newest_version()
        top = newest if before is None else min(newest, before - 1)
        for commit in self._log.backwards(top):
            if found := _checkpoint_of(commit, self._pipeline):
                yield found


def _checkpoint_of(commit: LogCommit, pipeline: str) -> tuple[VersionInfo, bytes] | None:
    """The checkpoint in a commit, as a store would keep it; damage in it is found by whoever decodes it."""
    info = commit.find_info(pipeline)
    if info is None:
        epoch = next((txn.get("version") for txn in commit.txns() if txn.get("appId") == epoch_txn(pipeline)), None)
        # An epoch that does not say its checkpoint any more must not make an older one look like the newest.
        return (
            None if epoch is None else (VersionInfo(commit.version, commit.time(), 0, f"epoch {epoch}: damaged"), b"")
        )
    if "checkpoint" not in info or "entry" not in info:
        return None
    kind = str(info.get("kind", "epoch"))
    value: Json = {"kind": kind, "checkpoint": info["checkpoint"], "entry": info["entry"]}
    data = encode({**value, "sinks": {}, "durations_ms": {}}, CheckpointRecord.__name__)
    return VersionInfo(commit.version, commit.time(), len(data), f"{kind} {info.get('epoch')}"), data
