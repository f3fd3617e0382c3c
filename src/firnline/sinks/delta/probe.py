"""Tries whether a storage can create an object only if it is absent, before a table is created on it."""

from __future__ import annotations

from firnline.errors import SinkError, StoreUnsafeError
from firnline.storage import Storage


def check_put_if_absent(storage: Storage, key: str) -> None:
    """Refuse a storage on which two writers could both create the same log file; `key` is used for a moment.

    Raises:
        StoreUnsafeError: it replaced an object that was there.
        SinkError: it cannot be written.
    """
    try:
        storage.put(key, b"probe")
        storage.put_new(key, b"probe again")
    except FileExistsError:
        return
    except OSError as error:
        raise SinkError(f"cannot write to {storage.root}: {error}", table=storage.root) from error
    finally:
        storage.delete(key)
    raise StoreUnsafeError(f"{storage.root} lies on a store without put-if-absent")
