"""A checkpoint store on any storage with put-if-absent: S3, GCS, Azure, or a folder on a share.

    <pipeline>/checkpoint/...  or  <pipeline>/parts/<part>/...
        floor/<inverted>-<n>                 numbers below n are pruned, even if objects still exist
        version/<inverted, two parts>-<n>    the bytes of version n; a deletion is a version of fixed content
        version/<inverted, two parts>-<n>.note

The inverted number (10^20 - 1 - n) makes every listing begin with the newest, so the newest is found by one request,
however many there are; the two parts keep the folders of a local disk short. A number belongs to the writer that
creates its object first. A stalled writer could create a number again that was taken and pruned meanwhile. The floor is
therefore raised before anything is pruned, and read again after every put; versions below it do not count.

The time of a version is its object's. Its note is written after it, and a kill in between loses only the note.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import ClassVar, TypeAlias

from firnline.clock import SystemClock, jitter
from firnline.errors import ConfigError
from firnline.faults import fault_point
from firnline.storage import FileStat, Storage
from firnline.stores.base import (
    COMPRESS_ABOVE_BYTES,
    KEY,
    PAGE,
    CheckpointStore,
    VersionInfo,
    prove_put_if_absent,
)

DELETED = b'{"deleted":true,"format":1,"type":"firnline-deletion"}\n'
_TOP = 10**20 - 1
_NAME = re.compile(r"(\d{17}/)?\d{3,20}-(\d{1,20})(\.note)?")
_ATTEMPTS = 1000  # for one put among rivals: each failed attempt is another writer's success
_READERS = 8
_Names: TypeAlias = list[str]  # inside the class, `list` is its method


@dataclass(frozen=True, slots=True)
class _Head:
    floor: int  # versions below do not count: pruned or deleted
    latest: int
    deleted: bool


class ObjectStore(CheckpointStore):
    """Versions as objects below the storage's root."""

    kind: ClassVar[str] = "object"

    def __init__(
        self, storage: Storage, *, held_by: str = "", compress_above_bytes: int = COMPRESS_ABOVE_BYTES
    ) -> None:
        super().__init__(held_by=held_by, compress_above_bytes=compress_above_bytes)
        self._storage = storage
        self._clock = SystemClock()

    @property
    def place(self) -> str:
        return self._storage.root

    def open(self) -> None:
        prove_put_if_absent(self._storage, ".probe")

    # -- raw ------------------------------------------------------------------------------------------

    def get_raw(self, key: str) -> bytes | None:
        folder = _folder(key)
        while latest := self._head(folder).latest:
            data = self._find(folder, latest)
            if data is not None or self._head(folder).latest == latest:  # otherwise it was just pruned for a newer one
                return None if data == DELETED else data
        return None

    def put_raw(self, key: str, data: bytes, note: str = "") -> int:
        self._check(key, data)
        folder = _folder(key)
        for attempt in range(_ATTEMPTS):
            version = self._ready(folder).latest + 1
            if self._create(folder, version, data) and version >= self._head(folder).floor:
                self._add_note(folder, version, note)
                return version
            self._clock.sleep(jitter(0, 0.001 * min(attempt, 50)))
        raise OSError(f"{key} in {self.place}: other writers were first {_ATTEMPTS} times")

    def delete(self, key: str) -> bool:
        folder = _folder(key)
        for _ in range(_ATTEMPTS):
            head = self._ready(folder)
            latest = head.latest
            if head.deleted or not latest:
                return False
            fault_point("store.delete.before")
            done = self._create(folder, latest + 1, DELETED)
            fault_point("store.delete.after")
            if done and latest + 1 >= self._head(folder).floor:
                self._sweep(folder, latest + 1)
                return True
        raise OSError(f"{key} in {self.place}: other writers were first {_ATTEMPTS} times")

    def list(self, prefix: str = "") -> Iterator[str]:
        found: _Names = []
        after: str | None = ""
        while after is not None:
            after = self._next_key(after, prefix, found)
        yield from sorted(found)

    def _next_key(self, after: str, prefix: str, found: _Names) -> str | None:
        """Add the next key. Returns where to continue: after a key's folder, without walking its versions."""
        for stat in self._storage.list("", after):
            folder, key = _key_of(stat.name.removeprefix(self._storage.root + "/"))
            if key is None:
                continue
            if key.startswith(prefix) and self._has_value(folder):
                found.append(key)
            return f"{self._storage.root}/{folder}/~"
        return None

    def _has_value(self, folder: str) -> bool:
        head = self._head(folder)
        return head.latest > 0 and not head.deleted

    # -- versions -------------------------------------------------------------------------------------

    def latest_version(self, key: str) -> int:
        return self._head(_folder(key)).latest

    def put_raw_versioned(self, key: str, data: bytes, expected: int, note: str = "") -> int:
        self._check(key, data)
        folder = _folder(key)
        version = expected + 1
        head = self._ready(folder)
        if head.latest == expected:
            if not self._create(folder, version, data):
                raise self._conflict(key, expected, self._head(folder).latest)
            if version < self._head(folder).floor:
                raise OSError(f"version {version} of {key} in {self.place} was pruned while it was put")
            self._add_note(folder, version, note)
        elif not head.floor <= version <= head.latest or self._find(folder, version) != data:
            raise self._conflict(key, expected, head.latest)
        return version

    def get_version_raw(self, key: str, version: int) -> bytes | None:
        folder = _folder(key)
        data = self._find(folder, version) if version > 0 else None
        if data is None or data == DELETED or version < self._head(folder).floor:
            return None
        return data

    def list_versions(self, key: str, *, before: int | None = None, limit: int = PAGE) -> Sequence[VersionInfo]:
        folder = _folder(key)
        floor = self._head(folder).floor
        found: list[tuple[int, FileStat]] = []
        noted: set[int] = set()
        if limit < 1 or (before is not None and before < 2):
            return []
        for name, version, stat in self._objects(folder, before):
            if version < floor or (len(found) == limit and found[-1][0] != version):
                break
            if name.endswith(".note"):
                noted.add(version)
            elif not self._is_deletion(folder, version, stat):
                found.append((version, stat))
        with ThreadPoolExecutor(_READERS) as readers:
            notes = dict(readers.map(lambda v: (v, self._note(folder, v)), [v for v, _ in found if v in noted]))
        return [
            VersionInfo(v, stat.modified_at.isoformat(timespec="milliseconds"), stat.size_bytes, notes.get(v, ""))
            for v, stat in found
        ]

    def prune(self, key: str, keep: int) -> int:
        folder = _folder(key)
        head = self._head(folder)
        if head.latest <= keep or not self._exists(folder, head.latest - keep):
            return 0  # without a gap, nothing older exists
        kept = 0
        for name, version, stat in self._objects(folder):
            if version < head.floor:
                break
            kept += not name.endswith(".note") and not self._is_deletion(folder, version, stat)
            if kept == keep:
                return self._sweep(folder, version)
        return 0

    # -- objects --------------------------------------------------------------------------------------

    def _check(self, key: str, data: bytes) -> None:
        if data == DELETED:
            raise ConfigError(f"a value for {key!r} is what marks a deletion")

    def _create(self, folder: str, version: int, data: bytes) -> bool:
        """Create a version. Returns False if the number is another writer's."""
        name = _name(folder, version)
        fault_point("store.put.before")
        try:
            self._storage.put_new(name, data)
        except FileExistsError:
            # A put that was sent twice meets its own first attempt.
            return self._find(folder, version) == data
        fault_point("store.put.after")
        return True

    def _add_note(self, folder: str, version: int, note: str) -> None:
        if note:
            self._storage.put(f"{_name(folder, version)}.note", f"{note}\n".encode())

    def _note(self, folder: str, version: int) -> str:
        with contextlib.suppress(FileNotFoundError):
            return self._storage.get(f"{_name(folder, version)}.note").decode(errors="replace").rstrip("\n")
        return ""

    def _find(self, folder: str, version: int) -> bytes | None:
        with contextlib.suppress(FileNotFoundError):
            return self._storage.get(_name(folder, version))
        return None

    def _exists(self, folder: str, version: int) -> bool:
        try:
            self._storage.stat(_name(folder, version))
        except FileNotFoundError:
            return False
        return True

    def _is_deletion(self, folder: str, version: int, stat: FileStat) -> bool:
        return stat.size_bytes == len(DELETED) and self._find(folder, version) in (DELETED, None)

    def _head(self, folder: str) -> _Head:
        """Return the head of a key, from one listing."""
        floor = 0
        for stat in self._storage.list(folder):
            kind, number = self._parse(stat, folder)
            if kind == "floor":
                floor = max(floor, number)
            elif kind == "version":
                deleted = self._is_deletion(folder, number, stat)
                return _Head(max(floor, number if deleted else 0), max(floor, number), deleted)
        return _Head(floor, floor, floor > 0)

    def _ready(self, folder: str) -> _Head:
        """Return the head for a writer: the rest of a killed deletion must not come back with a new value."""
        head = self._head(folder)
        if head.deleted:
            self._sweep(folder, head.latest)
        return head

    def _objects(self, folder: str, before: int | None = None) -> Iterator[tuple[str, int, FileStat]]:
        """Yield versions and notes below a number, newest first: a version, then its note."""
        after = f"{self._storage.root}/{_name(folder, before)}.~" if before is not None else ""
        for stat in self._storage.list(f"{folder}/version", after):
            number = self._parse(stat, folder)[1]
            if number:
                yield stat.name, number, stat

    def _parse(self, stat: FileStat, folder: str) -> tuple[str, int]:
        kind, _, name = stat.name.removeprefix(f"{self._storage.root}/{folder}/").partition("/")
        match = _NAME.fullmatch(name)
        return (kind, int(match[2])) if match else ("", 0)

    def _sweep(self, folder: str, below: int) -> int:
        """Raise the floor, then delete everything below. Returns how many versions were deleted."""
        floors = [(stat, self._parse(stat, folder)[1]) for stat in self._storage.list(f"{folder}/floor")]
        old = [*self._objects(folder, below)] if below > 1 else []
        if not old and not floors:
            return 0
        fault_point("store.prune.before")
        if max((number for _, number in floors), default=0) < below:
            with contextlib.suppress(FileExistsError):
                self._storage.put_new(f"{folder}/floor/{_TOP - below:020d}-{below}", b"")
        gone = 0
        for name, version, stat in reversed(old):
            gone += not name.endswith(".note") and not self._is_deletion(folder, version, stat)
            self._storage.delete(name.removeprefix(self._storage.root + "/"))
        for stat, number in floors:
            if 0 < number < below:
                self._storage.delete(stat.name.removeprefix(self._storage.root + "/"))
        fault_point("store.prune.after")
        return gone


def _folder(key: str) -> str:
    pipeline, _, part = key.partition("/")
    return f"{pipeline}/parts/{part}" if part else f"{pipeline}/checkpoint"


def _key_of(name: str) -> tuple[str, str | None]:
    """Return the folder and the key of an object; None for a foreign one."""
    parts = name.split("/")
    if len(parts) > 2 and parts[1] == "checkpoint" and KEY.fullmatch(parts[0]):
        return "/".join(parts[:2]), parts[0]
    if len(parts) > 3 and parts[1] == "parts" and KEY.fullmatch(f"{parts[0]}/{parts[2]}"):
        return "/".join(parts[:3]), f"{parts[0]}/{parts[2]}"
    return "", None


def _name(folder: str, version: int) -> str:
    inverted = f"{_TOP - version:020d}"
    return f"{folder}/version/{inverted[:17]}/{inverted[17:]}-{version}"
