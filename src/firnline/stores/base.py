"""The contract of a checkpoint store: values by key, each kept as a version; and what several backends share.

The durable form of a value is JSON with format number, type and checksum, compressed with zstd if it is large. A plain
editor reads small ones, `zstd -d` unpacks large ones. The envelope:

    {"checksum": "<sha-256 of the rest>", "format": 1, "type": "Checkpoint", "value": {...}}
"""

from __future__ import annotations

import contextlib
import functools
import os
import re
import uuid
import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any, ClassVar, Protocol, Self, TypeVar

import zstandard

from firnline.checkpoint.codec import canonical, parse, seal, unseal
from firnline.clock import SystemClock
from firnline.errors import (
    ConfigError,
    DamagedError,
    NewerFormatError,
    StoreReadOnlyError,
    StoreUnsafeError,
    VersionConflictError,
)
from firnline.storage import Storage
from firnline.types import Json

COMPRESS_ABOVE_BYTES = 16 * 1024
MAX_BYTES = 1 << 31  # limit of one unpacked value: a damaged length must not fill the memory
_MAGIC = b"\x28\xb5\x2f\xfd"


def encode(value: Json, kind: str, compress_above_bytes: int = COMPRESS_ABOVE_BYTES) -> bytes:
    """Return the bytes of a value. The same value always gives the same bytes."""
    text = canonical(seal({"type": kind, "value": value})) + b"\n"
    return zstandard.compress(text) if len(text) > compress_above_bytes else text


def decode(data: bytes, kind: str, what: str) -> Json:
    """Return the value.

    Raises:
        DamagedError: the content differs from what was encoded, or is a value of another type.
        NewerFormatError: a newer Firnline wrote it.
    """
    if is_compressed(data):
        data = _unpack(data, what)
    value = parse(data, what)
    try:
        body = unseal(value, what)
    except (ValueError, RecursionError) as error:  # JSON that `canonical` never writes: infinity, half a surrogate pair
        raise DamagedError(f"{what} is not what was written: {error}", what=what) from error
    if body.get("type") != kind or "value" not in body:
        raise DamagedError(f"{what} holds a {body.get('type')}, not a {kind}", what=what)
    return body["value"]


def is_compressed(data: bytes) -> bool:
    """Return whether these bytes are a zstd frame."""
    return data.startswith(_MAGIC)


def _unpack(data: bytes, what: str) -> bytes:
    try:
        if zstandard.frame_content_size(data) > MAX_BYTES:
            raise DamagedError(f"{what} says that it unpacks to more than {MAX_BYTES:,} bytes", what=what)
        return zstandard.ZstdDecompressor().decompress(data, max_output_size=MAX_BYTES)
    except (zstandard.ZstdError, MemoryError) as error:
        raise DamagedError(f"{what} cannot be unpacked: {error}", what=what) from error


KEY = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,127}(/[A-Za-z0-9][A-Za-z0-9_.-]{0,127})?")
PAGE = 100
MAX_VALUE_BYTES = 256 * 1024 * 1024  # limit of one stored version, which every backend accepts in one piece
MAX_NOTE = 500  # characters


class Model(Protocol):
    """A value with a JSON form: a checkpoint, a binlog position, an LSN."""

    def to_json(self) -> Json: ...

    @classmethod
    def from_json(cls, value: Json, what: str = ..., /) -> Self: ...


M = TypeVar("M", bound=Model)


@dataclass(frozen=True, slots=True)
class VersionInfo:
    """One version, without its bytes."""

    version: int
    created_at: str  # RFC 3339, UTC; for people: only the number gives the order
    size_bytes: int
    note: str = ""


def _check_key(key: str, *_: object, **__: object) -> None:
    """Refuse an invalid key before it becomes part of a path or a query."""
    if not KEY.fullmatch(key):
        raise ConfigError(f"{key!r} is no key of a checkpoint store: <pipeline> or <pipeline>/<part>")


def check_put(key: str, data: bytes, note: str = "") -> None:
    """Refuse a value that some backend cannot keep."""
    _check_key(key)
    if len(data) > MAX_VALUE_BYTES:
        raise ConfigError(
            f"a value for {key!r} has {len(data):,} bytes; a checkpoint store takes up to {MAX_VALUE_BYTES:,}",
            hint="Keep large state in snapshots, which a checkpoint only names.",
        )
    if len(note) > MAX_NOTE or not note.isprintable():
        raise ConfigError(f"a note is one line of up to {MAX_NOTE} characters: {note[:50]!r}")


def _check_put_versioned(key: str, data: bytes, expected: int, note: str = "") -> None:  # noqa: ARG001
    check_put(key, data, note)


def _check_prune(key: str, keep: int) -> None:
    _check_key(key)
    if keep < 1:
        raise ConfigError(f"cannot keep {keep} versions: the newest always stays")


_CHECKS: dict[str, Callable[..., None]] = {  # by method of a store: the check of its arguments
    "get_raw": _check_key,
    "put_raw": check_put,
    "delete": _check_key,
    "latest_version": _check_key,
    "put_raw_versioned": _check_put_versioned,
    "get_version_raw": _check_key,
    "list_versions": _check_key,
    "prune": _check_prune,
}


def _checked(method: Callable[..., Any], check: Callable[..., None]) -> Callable[..., Any]:
    """Return the method of a store behind the check of its arguments."""

    @functools.wraps(method)
    def checked(store: CheckpointStore, key: str, *args: Any, **kwargs: Any) -> Any:
        check(key, *args, **kwargs)
        return method(store, key, *args, **kwargs)

    return checked


class CheckpointStore(ABC):
    """Keeps checkpoints for people and for recovery.

    Safe for several threads and, if `shared` is True, for several processes. Every put is durable when it returns
    (except in memory). Errors of machine and server are OSError, and mean that the outcome is unknown: read back before
    a retry.

    A store implements the abstract methods and names its `kind`. This class checks keys, notes, sizes and `keep` before
    each of them: a method never gets one that is not allowed, and raises no ConfigError of its own for it.

    `held_by` names the sink that holds the checkpoints themselves, if any. Then the store is a copy.
    """

    kind: ClassVar[str]
    shared: ClassVar[bool] = True  # whether other processes see it
    writable: ClassVar[bool] = True

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        for name, check in _CHECKS.items():
            if name in vars(cls):
                setattr(cls, name, _checked(vars(cls)[name], check))

    def __init__(self, *, held_by: str = "", compress_above_bytes: int = COMPRESS_ABOVE_BYTES) -> None:
        self.held_by = held_by
        self.compress_above_bytes = compress_above_bytes

    # -- raw ------------------------------------------------------------------------------------------

    @property
    @abstractmethod
    def place(self) -> str:
        """The location, for messages; without secrets."""

    @abstractmethod
    def open(self) -> None:
        """Set up the store and check its guarantees. Called once, before anything else.

        Raises:
            StoreUnsafeError: it lacks put-if-absent.
            OSError: it cannot be reached.
        """

    def close(self) -> None:  # noqa: B027  # most have nothing to let go of
        """Close connections. The object is not used afterwards."""

    def supports_versioning(self) -> bool:
        """Return whether `put_raw_versioned`, `get_version_raw`, `list_versions` and `rollback` work."""
        return True

    @abstractmethod
    def get_raw(self, key: str) -> bytes | None:
        """Return the newest version's bytes; None if the key was never put, or was deleted."""

    @abstractmethod
    def put_raw(self, key: str, data: bytes, note: str = "") -> int:
        """Make `data` the newest version, whatever is there. Returns its number."""

    @abstractmethod
    def delete(self, key: str) -> bool:
        """Delete a key with all its versions. Returns whether there was a value.

        The deletion takes the next version number, so that numbers never start again.
        """

    @abstractmethod
    def list(self, prefix: str = "") -> Iterator[str]:
        """Return the keys that start with `prefix` and have a value, in byte order."""

    # -- versions -------------------------------------------------------------------------------------

    @abstractmethod
    def latest_version(self, key: str) -> int:
        """Return the number that `put_raw_versioned` must expect: 0 if the key was never put.

        After a delete it is the deletion's own number, although there is no value. Takes constant time, whatever the
        number of versions.
        """

    @abstractmethod
    def put_raw_versioned(self, key: str, data: bytes, expected: int, note: str = "") -> int:
        """Make `data` version `expected + 1`, if `expected` is the latest number. Returns the new number.

        If the version already exists with exactly these bytes, it is this put, whose answer was lost. That is success,
        even if newer versions follow it. Payloads of rivals must therefore differ (name the writer in them).

        Raises:
            VersionConflictError: another writer put a version since; nothing was written.
        """

    @abstractmethod
    def get_version_raw(self, key: str, version: int) -> bytes | None:
        """Return one version's bytes; None if it does not exist (never put, pruned, deleted)."""

    @abstractmethod
    def list_versions(self, key: str, *, before: int | None = None, limit: int = PAGE) -> Sequence[VersionInfo]:
        """Return a page of at most `limit` versions below `before`, newest first."""

    @abstractmethod
    def prune(self, key: str, keep: int) -> int:
        """Delete all but the newest `keep` versions (at least 1). Returns how many were deleted.

        The kept ones are always the newest without a gap. A kill in between leaves more of them, never fewer.
        """

    def rollback(self, key: str, version: int, note: str = "") -> int:
        """Put a new version equal to an old one. Returns its number.

        Raises:
            StoreReadOnlyError: a sink holds this checkpoint; only `firnline rollback` takes data and progress back.
            ConfigError: there is no such version.
        """
        if self.held_by and "/" not in key:
            raise StoreReadOnlyError(
                f"the checkpoint of {key!r} is held by sink {self.held_by!r}; this store only has a copy",
                hint=f"firnline rollback --to EPOCH takes table and checkpoint of {key!r} back together.",
            )
        expected = self.latest_version(key)
        data = self.get_version_raw(key, version)
        if data is None:
            raise ConfigError(f"{self.place} has no version {version} of {key!r}")
        return self.put_raw_versioned(key, data, expected, note or f"rollback to version {version}")

    # -- typed ----------------------------------------------------------------------------------------

    def put(self, key: str, model: Model, *, expected: int | None = None, note: str = "") -> int:
        """Put a model as sealed JSON; with `expected`, only onto that version. Returns the version."""
        data = encode(model.to_json(), type(model).__name__, self.compress_above_bytes)
        if expected is None:
            return self.put_raw(key, data, note)
        return self.put_raw_versioned(key, data, expected, note)

    def get(self, key: str, model: type[M], *, version: int | None = None) -> M | None:
        """Return the newest model, or that of one version; None if there is none.

        Raises:
            DamagedError: it is damaged; the message names the newest intact version.
            NewerFormatError: a newer Firnline wrote it.
        """
        what = f"{key} in {self.place}" if version is None else f"version {version} of {key} in {self.place}"
        try:
            data = self.get_raw(key) if version is None else self.get_version_raw(key, version)
            return None if data is None else self._decode(data, model, what)
        except DamagedError as error:
            intact = self._newest_intact(key, model, version)
            advice = f"the newest intact version is {intact}" if intact else "no version is intact"
            raise DamagedError(f"{error.message}; {advice}", hint=error.hint, what=what, intact=intact) from error

    def _decode(self, data: bytes, model: type[M], what: str) -> M:
        value = decode(data, model.__name__, what)
        try:
            return model.from_json(value, what)
        except (KeyError, TypeError, ValueError) as error:
            raise DamagedError(f"{what} is no {model.__name__}: {error}", what=what) from error

    def _newest_intact(self, key: str, model: type[Model], before: int | None) -> int | None:
        """Return the newest readable version below `before`."""
        try:
            while page := self.list_versions(key, before=before):
                for info in page:
                    if self._is_intact(key, model, info.version):
                        return info.version
                before = page[-1].version
        except DamagedError:  # the list itself is damaged: the rest is unknown
            pass
        return None

    def _is_intact(self, key: str, model: type[Model], version: int) -> bool:
        try:
            data = self.get_version_raw(key, version)
            if data is None:
                return False
            self._decode(data, model, f"version {version}")
        except (DamagedError, NewerFormatError):
            return False
        return True

    # -- for backends ---------------------------------------------------------------------------------

    def _conflict(self, key: str, expected: int, latest: int) -> VersionConflictError:
        return VersionConflictError(
            f"{key} in {self.place} is at version {latest}, not {expected}",
            key=key,
            expected=expected,
            latest=latest,
        )


class Connected(Protocol):
    """A store with a connection, which a forked child must neither use nor close."""

    def after_fork(self) -> None: ...


_connected: weakref.WeakSet[Connected] = weakref.WeakSet()  # the system's list of hooks only grows


def reset_after_fork(store: Connected) -> None:
    """Call `after_fork` in forked children for the lifetime of the store."""
    _connected.add(store)


def _reset_all() -> None:
    for store in list(_connected):
        store.after_fork()


os.register_at_fork(after_in_child=_reset_all)


def timestamp(at: float | None = None) -> str:
    """Return a file's time, or the current time, as RFC 3339 in UTC."""
    moment = SystemClock().now() if at is None else datetime.fromtimestamp(at, UTC)
    return moment.isoformat(timespec="milliseconds")


def prove_put_if_absent(storage: Storage, folder: str = "") -> None:
    """Test on the real storage that `put_new` refuses an existing name. Leaves nothing behind.

    Raises:
        StoreUnsafeError: it replaced an existing object.
        OSError: the storage cannot be reached or written.
    """
    key = f"{folder}/probe-{uuid.uuid4().hex}".removeprefix("/")
    storage.put(key, b"first\n")
    try:
        with contextlib.suppress(FileExistsError):
            storage.put_new(key, b"second\n")
            raise StoreUnsafeError(f"{storage.root} overwrites objects although asked to create only")
        if storage.get(key) != b"first\n":
            raise StoreUnsafeError(f"{storage.root} says that it refused to replace, but replaced")
    finally:
        storage.delete(key)
