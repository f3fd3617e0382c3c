"""A checkpoint store in a folder of local disk: plain JSON files that a person can read.

    <root>/<pipeline>/checkpoint/            versions of the key <pipeline>
    <root>/<pipeline>/parts/<part>/          versions of the key <pipeline>/<part>
        00000000000000000007.json            one version; its time is the file's; `.json.zst` when packed (`zstd -d`)
        00000000000000000007.note            its note, if it has one
        00000000000000000009.deleted         a deletion: number 9, no value
        HEAD                                 the newest number: a hint, checked at every use
        .lock                                held during put, delete and prune; names its last owner
    <root>/.tmp/                             files that are still being written

A version is written to a temporary file, fsynced, linked to its name (a link refuses to replace), and its folder is
fsynced. The lock (flock, which the system lets go of when a process dies) makes a number belong to one file, whatever
its suffix, and keeps a writer that stood still from bringing back a number that was pruned. Use a disk of this machine;
for a share, use the object store with a folder.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import uuid
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import ClassVar

from firnline.clock import SystemClock
from firnline.errors import StoreUnsafeError
from firnline.faults import fault_point
from firnline.process import this_process
from firnline.storage import LocalStorage, fsync_path, make_folders
from firnline.stores.base import (
    COMPRESS_ABOVE_BYTES,
    KEY,
    PAGE,
    CheckpointStore,
    VersionInfo,
    is_compressed,
    prove_put_if_absent,
    timestamp,
)

LOCK_SECONDS = 10.0  # a put takes milliseconds; a process that holds the lock for longer was stopped
SWEEP_AFTER_SECONDS = 3600.0
_PLAIN, _PACKED, _DELETED, _NOTE = ".json", ".json.zst", ".deleted", ".note"
_SUFFIXES = (_PLAIN, _PACKED, _DELETED)
_VERSION = re.compile(r"(\d{20})(\.json|\.json\.zst|\.deleted)")
_HINT = re.compile(rb"\d{1,18}\n")
_PROBES = 64  # forward from the hint; one killed writer leaves no hint older than this


class FileStore(CheckpointStore):
    """Versions as files below `root`."""

    kind: ClassVar[str] = "file"

    def __init__(self, root: str, *, held_by: str = "", compress_above_bytes: int = COMPRESS_ABOVE_BYTES) -> None:
        super().__init__(held_by=held_by, compress_above_bytes=compress_above_bytes)
        self._root = os.path.abspath(root)
        self._temporary = os.path.join(self._root, ".tmp")
        self._clock = SystemClock()

    @property
    def place(self) -> str:
        return self._root

    def open(self) -> None:
        make_folders(self._temporary)
        prove_put_if_absent(LocalStorage(self._temporary))
        self._prove_lock()
        self._sweep()

    # -- raw ------------------------------------------------------------------------------------------

    def get_raw(self, key: str) -> bytes | None:
        folder = self._folder(key)
        while latest := self._latest(folder):
            found = self._find(folder, latest)
            if found is not None and found.endswith(_DELETED):
                return None
            with contextlib.suppress(FileNotFoundError):
                if found is not None:
                    return Path(found).read_bytes()
            # Pruned since it was found: a newer one exists. Without one, the folder was emptied by hand.
            if self._latest(folder) == latest:
                return None
        return None

    def put_raw(self, key: str, data: bytes, note: str = "") -> int:
        folder = self._folder(key)
        with self._locked(folder):
            return self._publish(folder, self._latest(folder), data, note)

    def delete(self, key: str) -> bool:
        folder = self._folder(key)
        if not os.path.isdir(folder):
            return False
        with self._locked(folder):
            latest = self._latest(folder)
            found = self._find(folder, latest)
            if found is None or found.endswith(_DELETED):
                self._remove(folder, self._numbers(folder), below=latest)  # left by a killed deletion
                return False
            path = os.path.join(folder, f"{latest + 1:020d}{_DELETED}")
            fault_point("store.delete.before")
            self._link_new(path, b"")
            fsync_path(folder)
            self._hint(folder, latest + 1)
            fault_point("store.delete.after")
            self._remove(folder, self._numbers(folder), below=latest + 1)
            return True

    def list(self, prefix: str = "") -> Iterator[str]:
        found = []
        for pipeline in _folders(self._root):
            keys = [pipeline, *(f"{pipeline}/{part}" for part in _folders(os.path.join(self._root, pipeline, "parts")))]
            found += [k for k in keys if k.startswith(prefix) and KEY.fullmatch(k) and self._has_value(k)]
        yield from sorted(found)

    def _has_value(self, key: str) -> bool:
        folder = self._folder(key)
        newest = self._find(folder, self._latest(folder))
        return newest is not None and not newest.endswith(_DELETED)

    # -- versions -------------------------------------------------------------------------------------

    def latest_version(self, key: str) -> int:
        return self._latest(self._folder(key))

    def put_raw_versioned(self, key: str, data: bytes, expected: int, note: str = "") -> int:
        folder = self._folder(key)
        with self._locked(folder):
            latest = self._latest(folder)
            if latest == expected:
                return self._publish(folder, latest, data, note)
            if self._is_deleted(folder, latest) or self._read(folder, expected + 1) != data:
                raise self._conflict(key, expected, latest)
            fsync_path(folder)  # a writer killed before this point may have caused the lost answer
            return expected + 1

    def get_version_raw(self, key: str, version: int) -> bytes | None:
        folder = self._folder(key)
        data = self._read(folder, version)
        return None if data is None or self._is_deleted(folder, self._latest(folder)) else data

    def list_versions(self, key: str, *, before: int | None = None, limit: int = PAGE) -> Sequence[VersionInfo]:
        folder = self._folder(key)
        latest = self._latest(folder)
        if self._is_deleted(folder, latest):
            return []
        top = latest if before is None else min(latest, before - 1)
        infos: list[VersionInfo] = []
        missing = 0
        while top > 0 and len(infos) < limit and missing <= _PROBES:
            path = self._find(folder, top)
            missing = 0 if path else missing + 1  # some files may have been removed by hand
            if path and not path.endswith(_DELETED):
                with contextlib.suppress(FileNotFoundError):
                    stat = os.stat(path)
                    infos.append(VersionInfo(top, timestamp(stat.st_mtime), stat.st_size, self._note(folder, top)))
            top -= 1
        return infos

    def prune(self, key: str, keep: int) -> int:
        folder = self._folder(key)
        if not self._find(folder, max(self._latest(folder) - keep, 0)):
            return 0  # without a gap, nothing older exists
        with self._locked(folder):
            numbers = self._numbers(folder)
            values = sorted(n for n, suffixes in numbers.items() if suffixes != {_DELETED})
            if len(values) <= keep or self._is_deleted(folder, max(numbers)):
                return 0
            return self._remove(folder, numbers, below=values[-keep])

    # -- files ----------------------------------------------------------------------------------------

    def _folder(self, key: str) -> str:
        pipeline, _, part = key.partition("/")
        return os.path.join(self._root, pipeline, *(("parts", part) if part else ("checkpoint",)))

    def _find(self, folder: str, version: int) -> str | None:
        """Return the file of a version number."""
        for suffix in _SUFFIXES:
            path = os.path.join(folder, f"{version:020d}{suffix}")
            if os.path.exists(path):
                return path
        return None

    def _is_deleted(self, folder: str, latest: int) -> bool:
        """Return whether the newest number is a deletion. Then nothing below counts, even if the files still exist."""
        return os.path.exists(os.path.join(folder, f"{latest:020d}{_DELETED}"))

    def _read(self, folder: str, version: int) -> bytes | None:
        path = self._find(folder, version) if version > 0 else None
        if path is None or path.endswith(_DELETED):
            return None
        with contextlib.suppress(FileNotFoundError):
            return Path(path).read_bytes()
        return None

    def _note(self, folder: str, version: int) -> str:
        with contextlib.suppress(FileNotFoundError):
            text = Path(folder, f"{version:020d}{_NOTE}").read_bytes().decode(errors="replace")
            return text.rstrip("\n")
        return ""

    def _numbers(self, folder: str) -> dict[int, set[str]]:
        """Return every version number in the folder, by listing it."""
        found: dict[int, set[str]] = {}
        with contextlib.suppress(FileNotFoundError):
            for name in os.listdir(folder):
                if match := _VERSION.fullmatch(name):
                    found.setdefault(int(match[1]), set()).add(match[2])
        return found

    def _latest(self, folder: str) -> int:
        """Return the newest number: from the hint if it leads to a file, otherwise by listing."""
        try:
            text = Path(folder, "HEAD").read_bytes()
        except FileNotFoundError:
            text = b""
        number = int(text) if _HINT.fullmatch(text) else 0
        if number and self._find(folder, number):
            for ahead in range(number + 1, number + _PROBES):
                if not self._find(folder, ahead):
                    if self._find(folder, ahead + 1):
                        break  # a gap, made by hand
                    return ahead - 1
        return max(self._numbers(folder), default=0)

    def _publish(self, folder: str, latest: int, data: bytes, note: str) -> int:
        """Create the next number's file and its note. Called under the lock."""
        if self._is_deleted(folder, latest):
            self._remove(folder, self._numbers(folder), below=latest)  # the rest of a killed deletion must not return
        version = latest + 1
        beside = os.path.join(folder, f"{version:020d}{_NOTE}")
        path = os.path.join(folder, f"{version:020d}{_PACKED if is_compressed(data) else _PLAIN}")
        fault_point("store.put.before")
        # The note goes first: it has no effect without a version. The note of a killed writer is replaced.
        with contextlib.suppress(FileNotFoundError):
            os.unlink(beside)
        if note:
            self._link_new(beside, f"{note}\n".encode())
        self._link_new(path, data)
        fsync_path(folder)  # both names at once
        fault_point("store.put.after")
        self._hint(folder, version)
        return version

    def _link_new(self, path: str, data: bytes) -> None:
        """Link data to an unused name. The name is durable once its folder is fsynced."""
        temporary = self._write_temporary(data)
        try:
            fault_point("store.publish.before")
            os.link(temporary, path)
        finally:
            os.unlink(temporary)
        fault_point("store.publish.after")

    def _write_temporary(self, data: bytes) -> str:
        path = os.path.join(self._temporary, f"{uuid.uuid4().hex}.tmp")
        make_folders(self._temporary)
        try:
            with open(path, "xb") as stream:
                stream.write(data)
                stream.flush()
                os.fsync(stream.fileno())
        except OSError:
            with contextlib.suppress(OSError):  # failed writes must not fill a full disk
                os.unlink(path)
            raise
        return path

    def _hint(self, folder: str, version: int) -> None:
        """Write the hint. The version is valid without it, so errors are ignored.

        The hint is written in place: the next fsync would wait for a new file. A reader detects a partial write.
        """
        text = b"%d\n" % version
        with contextlib.suppress(OSError):
            descriptor = os.open(os.path.join(folder, "HEAD"), os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o644)
            try:
                os.pwrite(descriptor, text, 0)
                if os.fstat(descriptor).st_size != len(text):
                    os.ftruncate(descriptor, len(text))
            finally:
                os.close(descriptor)

    def _remove(self, folder: str, numbers: dict[int, set[str]], below: int) -> int:
        """Delete numbers below one, oldest first, under the lock. Returns how many of them had a value."""
        fsync_path(folder)  # a writer killed before this point may have put the newer version
        fault_point("store.prune.before")
        gone = 0
        for number in sorted(n for n in numbers if n < below):
            for suffix in (*numbers[number], _NOTE):
                with contextlib.suppress(FileNotFoundError):
                    os.unlink(os.path.join(folder, f"{number:020d}{suffix}"))
            gone += numbers[number] != {_DELETED}
        fsync_path(folder)
        fault_point("store.prune.after")
        return gone

    @contextlib.contextmanager
    def _locked(self, folder: str) -> Iterator[None]:
        make_folders(folder)
        with self._lock_file(os.path.join(folder, ".lock")):
            yield

    @contextlib.contextmanager
    def _lock_file(self, path: str, seconds: float | None = None) -> Iterator[None]:
        """Hold a lock, also against other threads, since every call opens the file again. Raises OSError if it stays
        locked."""
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        try:
            pause = 0.0005
            deadline = self._clock.monotonic() + (LOCK_SECONDS if seconds is None else seconds)
            while True:
                try:
                    fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    break
                except BlockingIOError as error:
                    if self._clock.monotonic() > deadline:
                        raise TimeoutError(_locked_by(path, descriptor)) from error
                self._clock.sleep(pause)
                pause = min(pause * 1.5, 0.02)
            try:
                _sign(descriptor)
                yield
            finally:
                fcntl.flock(descriptor, fcntl.LOCK_UN)  # a forked child may hold the descriptor too
        finally:
            os.close(descriptor)

    def _prove_lock(self) -> None:
        path = os.path.join(self._temporary, f"{uuid.uuid4().hex}.tmp")
        try:
            with self._lock_file(path), contextlib.suppress(TimeoutError), self._lock_file(path, 0.0):
                raise StoreUnsafeError(
                    f"the disk of {self._root} lets two hold the same lock",
                    hint="Use a disk of this machine, or store: {type: object} for a mounted share.",
                )
        finally:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(path)

    def _sweep(self) -> None:
        """Delete temporary files of killed writers."""
        oldest = self._clock.now().timestamp() - SWEEP_AFTER_SECONDS
        with os.scandir(self._temporary) as entries:
            for entry in entries:
                with contextlib.suppress(FileNotFoundError):  # another process sweeps too
                    if entry.stat().st_mtime < oldest:
                        os.unlink(entry.path)


def _sign(descriptor: int) -> None:
    """Write the owner's name into the lock file, for people. A full disk is no failure."""
    me = this_process()
    text = f"{me.pid} {me.host}\n".encode()
    with contextlib.suppress(OSError):
        if os.pread(descriptor, len(text) + 1, 0) != text:
            os.pwrite(descriptor, text, 0)
            os.ftruncate(descriptor, len(text))


def _locked_by(path: str, descriptor: int) -> str:
    """Return the message for a lock that stays taken, with advice."""
    words = b""
    with contextlib.suppress(OSError):
        words = os.pread(descriptor, 512, 0)
    pid, _, host = words.decode(errors="replace").strip().partition(" ")
    if not (pid.isdigit() and host):
        return f"{path} is locked by another process that does not go on; end that process"
    return f"{path} is locked by process {pid} on {host}, which does not go on; end it there: kill -9 {pid}"


def _folders(folder: str) -> list[str]:
    with contextlib.suppress(FileNotFoundError, NotADirectoryError), os.scandir(folder) as entries:
        return [entry.name for entry in entries if entry.is_dir() and not entry.name.startswith(".")]
    return []
