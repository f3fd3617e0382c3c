"""Failures on demand: at a fault point, or in the n-th call of local storage (SQLite's way of testing error paths)."""

from __future__ import annotations

import errno
import os
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import firnline.faults
import firnline.storage
from firnline.storage import FileStat, LocalStorage, Readable, Writable

__all__ = ["ERRORS", "Faults", "FaultyStorage", "failing_at", "faulty_storage", "follow_points", "reached_points"]

ERRORS = {
    "EIO": OSError(errno.EIO, "injected I/O error"),
    "ENOSPC": OSError(errno.ENOSPC, "injected: no space left on device"),
    "timeout": TimeoutError(errno.ETIMEDOUT, "injected timeout"),
}


@dataclass(slots=True)
class Faults:
    """Which call fails, and how. `after` fails a call that was performed: its answer is lost."""

    nth: int = 0  # 0: none
    error: str = "EIO"
    for_ever: bool = False
    after: bool = False
    calls: list[str] = field(default_factory=list)
    _lock: Any = field(default_factory=threading.Lock)

    def count(self, call: str) -> bool:
        """Note a call; whether it must fail."""
        with self._lock:
            self.calls.append(call)
            number = len(self.calls)
        return bool(self.nth) and (number == self.nth or (self.for_ever and number >= self.nth))


class FaultyStorage(LocalStorage):
    """Fails as its `Faults` say; streams count every read, write and close too."""

    faults: Faults

    def _guard(self, call: str, perform: Any) -> Any:
        fails = self.faults.count(call)
        if fails and not self.faults.after:
            raise ERRORS[self.faults.error]
        result = perform()
        if fails:
            raise ERRORS[self.faults.error]
        return result

    def get(self, key: str) -> bytes:
        return bytes(self._guard(f"get {key}", lambda: LocalStorage.get(self, key)))

    def put(self, key: str, data: bytes) -> None:
        self._guard(f"put {key}", lambda: LocalStorage.put(self, key, data))

    def put_new(self, key: str, data: bytes) -> None:
        self._guard(f"put_new {key}", lambda: LocalStorage.put_new(self, key, data))

    def delete(self, key: str) -> None:
        self._guard(f"delete {key}", lambda: LocalStorage.delete(self, key))

    def list(self, prefix: str, after: str = "") -> Iterator[FileStat]:
        yield from self._guard(f"list {prefix}", lambda: list(LocalStorage.list(self, prefix, after)))

    def stat(self, key: str) -> FileStat:
        found: FileStat = self._guard(f"stat {key}", lambda: LocalStorage.stat(self, key))
        return found

    def open_read(self, key: str, offset: int = 0) -> Readable:
        stream = self._guard(f"open {key}", lambda: LocalStorage.open_read(self, key, offset))
        return _FaultyStream(stream, key, self._guard)

    def create(self, key: str) -> Writable:
        return _FaultyStream(self._guard(f"create {key}", lambda: LocalStorage.create(self, key)), key, self._guard)


class _FaultyStream:
    def __init__(self, stream: Any, key: str, guard: Any) -> None:
        self._stream = stream
        self._key = key
        self._guard = guard

    def read(self, size: int = -1, /) -> bytes:
        return bytes(self._guard(f"read {self._key}", lambda: self._stream.read(size)))

    def write(self, data: Any, /) -> int:
        return int(self._guard(f"write {self._key}", lambda: self._stream.write(data)))

    def close(self) -> None:
        self._guard(f"close {self._key}", self._stream.close)


@contextmanager
def faulty_storage(faults: Faults) -> Iterator[Faults]:
    """Make every local storage that is opened meanwhile a faulty one."""
    made: Any = type("CountedStorage", (FaultyStorage,), {"faults": faults})
    original = firnline.storage.LocalStorage
    firnline.storage.LocalStorage = made  # type: ignore[misc]
    try:
        yield faults
    finally:
        firnline.storage.LocalStorage = original  # type: ignore[misc]


@contextmanager
def reached_points() -> Iterator[Counter[str]]:
    """Count how often each fault point is reached, in any module and by any thread."""
    reached: Counter[str] = Counter()
    counting = threading.Lock()

    def count(name: str) -> None:
        with counting:
            reached[name] += 1

    with follow_points(count):
        yield reached


@contextmanager
def follow_points(notify: Callable[[str], None]) -> Iterator[None]:
    """Call `notify` with the name of every fault point that this process reaches, also in modules of your own."""
    firnline.faults.followers.append(notify)
    try:
        yield
    finally:
        firnline.faults.followers.remove(notify)


@contextmanager
def failing_at(point: str, call: int = 1) -> Iterator[None]:
    """Raise `InjectedFaultError`, an OSError, at one call of a fault point."""
    before = os.environ.get(firnline.faults.VARIABLE)
    firnline.faults._seen.clear()
    os.environ[firnline.faults.VARIABLE] = f"{point}:{call}:raise"
    try:
        yield
    finally:
        firnline.faults._seen.clear()
        if before is None:
            del os.environ[firnline.faults.VARIABLE]
        else:
            os.environ[firnline.faults.VARIABLE] = before
