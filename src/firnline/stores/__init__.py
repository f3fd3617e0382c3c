"""Copies of checkpoints: the contract of a store, backends, tiers, replication, leases, audit. `__all__` is public."""

from __future__ import annotations

import logging
import os

from firnline.errors import ConfigError
from firnline.options import StoreOptions
from firnline.stores.base import CheckpointStore, VersionInfo
from firnline.stores.record import CheckpointRecord

__all__ = ["CheckpointRecord", "CheckpointStore", "StoreOptions", "VersionInfo", "open_store"]

logger = logging.getLogger(__name__)

_READ_AS_THEY_ARE = ("file", "object")  # opening only creates folders and checks what writers rely on
_warned: set[str] = set()


def open_store(options: StoreOptions, *, held_by: str = "", read_only: bool = False) -> CheckpointStore:
    """Open the store that the options name.

    Args:
        held_by: The sink that holds the checkpoints themselves, if any.
        read_only: Create and test nothing there. A location without a writer's setup is empty.

    Raises:
        ConfigError: the options have no location.
        MissingExtraError: its library is not installed.
        StoreUnsafeError: it lacks put-if-absent.
        DamagedError: its content cannot be read.
        OSError: it cannot be reached.
    """
    store = _construct(options, held_by, read_only)
    if not (read_only and options.type in _READ_AS_THEY_ARE):
        store.open()
    elif os.path.isfile(options.path):
        raise NotADirectoryError(f"{options.path} is no folder")
    if not store.shared and store.kind not in _warned:
        _warned.add(store.kind)
        logger.warning("checkpoints are kept in memory: gone when this process ends")
    return store


def _construct(options: StoreOptions, held_by: str, read_only: bool) -> CheckpointStore:
    above = options.compress_above_bytes
    if options.type == "memory":
        from firnline.stores.memory import MemoryStore

        return MemoryStore(held_by=held_by, compress_above_bytes=above)
    if options.type == "file":
        from firnline.stores.file import FileStore

        return FileStore(_given(options, "path"), held_by=held_by, compress_above_bytes=above)
    if options.type == "sqlite":
        from firnline.stores.sqlite import SqliteStore

        path = _given(options, "path")
        return SqliteStore(path, held_by=held_by, compress_above_bytes=above, read_only=read_only)
    if options.type == "postgres":
        from firnline.stores.postgres import PostgresStore

        dsn = _given(options, "dsn")
        return PostgresStore(dsn, held_by=held_by, compress_above_bytes=above, read_only=read_only)
    from firnline.storage import open_storage
    from firnline.stores.objects import ObjectStore

    storage = open_storage(_given(options, "uri"), options.storage_options)
    return ObjectStore(storage, held_by=held_by, compress_above_bytes=above)


def _given(options: StoreOptions, name: str) -> str:
    value = str(getattr(options, name))
    if not value:
        raise ConfigError(f"a checkpoint store of type {options.type!r} needs `{name}`")
    return value
