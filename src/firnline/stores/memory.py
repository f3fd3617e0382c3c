"""A checkpoint store in this process's memory, for tests and for runs whose checkpoints need not outlive them."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import ClassVar

from firnline.stores.base import (
    COMPRESS_ABOVE_BYTES,
    PAGE,
    CheckpointStore,
    VersionInfo,
    timestamp,
)


@dataclass(slots=True)
class _Kept:
    latest: int = 0
    versions: dict[int, tuple[bytes, VersionInfo]] = field(default_factory=dict)


class MemoryStore(CheckpointStore):
    """A store that ends with this process."""

    kind: ClassVar[str] = "memory"
    shared: ClassVar[bool] = False

    def __init__(self, *, held_by: str = "", compress_above_bytes: int = COMPRESS_ABOVE_BYTES) -> None:
        super().__init__(held_by=held_by, compress_above_bytes=compress_above_bytes)
        self._lock = threading.Lock()
        self._keys: dict[str, _Kept] = {}

    @property
    def place(self) -> str:
        return "memory"

    def open(self) -> None:
        """Do nothing: a store in memory needs no setup."""

    def get_raw(self, key: str) -> bytes | None:
        with self._lock:
            kept = self._keys.get(key, _Kept())
            found = kept.versions.get(kept.latest)
            return found[0] if found else None

    def put_raw(self, key: str, data: bytes, note: str = "") -> int:
        with self._lock:
            return self._add(key, data, note)

    def delete(self, key: str) -> bool:
        with self._lock:
            kept = self._keys.get(key)
            if kept is None or not kept.versions:
                return False
            kept.latest += 1
            kept.versions.clear()
            return True

    def list(self, prefix: str = "") -> Iterator[str]:
        with self._lock:
            found = [key for key, kept in self._keys.items() if key.startswith(prefix) and kept.versions]
        yield from sorted(found)

    def latest_version(self, key: str) -> int:
        with self._lock:
            return self._keys.get(key, _Kept()).latest

    def put_raw_versioned(self, key: str, data: bytes, expected: int, note: str = "") -> int:
        with self._lock:
            kept = self._keys.get(key, _Kept())
            if kept.latest == expected:
                return self._add(key, data, note)
            found = kept.versions.get(expected + 1)
            if found is None or found[0] != data:
                raise self._conflict(key, expected, kept.latest)
            return expected + 1

    def get_version_raw(self, key: str, version: int) -> bytes | None:
        with self._lock:
            found = self._keys.get(key, _Kept()).versions.get(version)
            return found[0] if found else None

    def list_versions(self, key: str, *, before: int | None = None, limit: int = PAGE) -> Sequence[VersionInfo]:
        with self._lock:
            infos = [info for _, info in self._keys.get(key, _Kept()).versions.values()]
        wanted = [info for info in reversed(infos) if before is None or info.version < before]
        return wanted[: max(limit, 0)]

    def prune(self, key: str, keep: int) -> int:
        with self._lock:
            versions = self._keys.get(key, _Kept()).versions
            gone = [*versions][:-keep]
            for version in gone:
                del versions[version]
            return len(gone)

    def _add(self, key: str, data: bytes, note: str) -> int:
        kept = self._keys.setdefault(key, _Kept())
        kept.latest += 1
        kept.versions[kept.latest] = (bytes(data), VersionInfo(kept.latest, timestamp(), len(data), note))
        return kept.latest
