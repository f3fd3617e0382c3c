"""What several backends share: times for people, and the proof that a storage creates only what is absent."""

from __future__ import annotations

import contextlib
import uuid
from datetime import UTC, datetime

from firnline.clock import SystemClock
from firnline.errors import StoreUnsafeError
from firnline.storage import Storage


def timestamp(at: float | None = None) -> str:
    """RFC 3339, UTC: of a file's time, or now."""
    moment = SystemClock().now() if at is None else datetime.fromtimestamp(at, UTC)
    return moment.isoformat(timespec="milliseconds")


def prove_put_if_absent(storage: Storage, folder: str = "") -> None:
    """Try on the real storage that `put_new` refuses what exists; leaves nothing behind.

    Raises:
        StoreUnsafeError: it replaced what was there.
        OSError: the storage cannot be reached or written.
    """
    key = f"{folder}/probe-{uuid.uuid4().hex}".removeprefix("/")
    storage.put(key, b"first\n")
    try:
        with contextlib.suppress(FileExistsError):
            storage.put_new(key, b"second\n")
            raise StoreUnsafeError(f"{storage.root} replaces what exists, although it was told to create only")
        if storage.get(key) != b"first\n":
            raise StoreUnsafeError(f"{storage.root} says that it refused to replace, but replaced")
    finally:
        storage.delete(key)
