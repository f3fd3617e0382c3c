"""Lists a table's folder: every file that a sweep may consider, with its age by the storage's own clock.

Symbolic links are never followed, `_delta_log` and `_staging/pending` are never entered, and nothing outside the table
is ever listed.
"""

from __future__ import annotations

import os
import uuid
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta

from firnline.errors import ConfigError
from firnline.names import CHANGE_FILE, DELTA_LOG, EXCHANGE_FILE, PENDING, QUARANTINE_FILE, TEMPORARY_FILE, clock_key
from firnline.sinks.delta.table import Table
from firnline.storage import Storage, is_remote, open_storage

TEMPORARY_SECONDS = 3600  # a temporary file lives for as long as one write
EXCHANGE_SECONDS = 3600  # and rows on their way for as long as one epoch

Progress = Callable[[str, int, int], None]  # the activity, the amount done, the total (0: unknown)


@dataclass(frozen=True, slots=True)
class TableFile:
    """One file below the table's folder."""

    key: str
    size_bytes: int
    modified_at: datetime


@dataclass(slots=True)
class Candidates:
    """Files that may be deleted unless something names them; `kept` counts why others stay."""

    files: dict[str, TableFile] = field(default_factory=dict)
    kept: Counter[str] = field(default_factory=Counter)

    def drop(self, keys: Iterable[str], reason: str) -> int:
        """Drop named files. Returns how many of them were candidates."""
        dropped = sum(1 for key in keys if self.files.pop(key, None) is not None)
        if dropped:
            self.kept[reason] += dropped
        return dropped

    def drop_where(self, named: Callable[[TableFile], bool], reason: str) -> None:
        self.drop([key for key, file in self.files.items() if named(file)], reason)


@dataclass(slots=True)
class Survey:
    """A listing of the table by kind of file; only files older than the grace period."""

    now: datetime
    data: Candidates = field(default_factory=Candidates)
    quarantine: dict[str, list[tuple[int, TableFile]]] = field(default_factory=dict)  # by pipeline, with the epoch
    temporary: list[TableFile] = field(default_factory=list)
    exchange: dict[str, list[TableFile]] = field(default_factory=dict)  # by pipeline; whatever the grace period
    listed: int = 0
    names: set[str] = field(default_factory=set)  # of data files, whatever their age


def open_table(uri: str, options: dict[str, str], kind: type[Table] = Table) -> tuple[Storage, Table]:
    """Return storage and handle of an existing table."""
    storage = open_storage(uri, options)
    table = kind(storage.root, options)
    if not table.refresh():
        raise ConfigError(f"{storage.root} is no Delta table", hint="Check the path.", table=storage.root)
    return storage, table


def storage_now(storage: Storage) -> datetime:
    """Return the time of the clock that stamps the table's files, which may differ from this machine's."""
    key = clock_key(uuid.uuid4().hex)  # named as a temporary file: one that is left behind is swept
    storage.put(key, b"")
    try:
        return storage.stat(key).modified_at
    finally:
        storage.delete(key)


def survey(storage: Storage, now: datetime, grace_seconds: float, progress: Progress | None = None) -> Survey:
    """List the table."""
    found = Survey(now)
    for file in walk(storage):
        found.listed += 1
        if progress is not None and found.listed % 1000 == 0:
            progress("listing", found.listed, 0)
        _sort_in(found, file, grace_seconds)
    return found


def _sort_in(found: Survey, file: TableFile, grace_seconds: float) -> None:
    name = file.key.rsplit("/", 1)[-1]
    age = (found.now - file.modified_at).total_seconds()
    exchanged = EXCHANGE_FILE.fullmatch(file.key)
    if exchanged is not None:
        if age > EXCHANGE_SECONDS:
            found.exchange.setdefault(exchanged["pipeline"], []).append(file)
        return
    if TEMPORARY_FILE.fullmatch(name):
        if age > max(grace_seconds, TEMPORARY_SECONDS):
            found.temporary.append(file)
        return
    quarantined = QUARANTINE_FILE.fullmatch(file.key)
    if quarantined is not None:
        if age > 0 and age >= grace_seconds:
            found.quarantine.setdefault(quarantined["pipeline"], []).append((int(quarantined["epoch"]), file))
        return
    if not name.endswith(".parquet") or (is_hidden(file.key) and not CHANGE_FILE.fullmatch(file.key)):
        return
    found.names.add(file.key)
    if age < 0:
        found.data.kept["from the future"] += 1
    elif age < grace_seconds:
        found.data.kept["young"] += 1
    else:
        found.data.files[file.key] = file


def is_hidden(key: str) -> bool:
    """Return whether Delta's readers and writers ignore a path; a partition folder may start with an underscore."""
    return any(part[:1] in ("_", ".") and "=" not in part for part in key.split("/"))


def walk(storage: Storage, folder: str = "") -> Iterator[TableFile]:
    """Yield every file that a sweep may consider, below a folder of the table."""
    if is_remote(storage.root):
        prefix = storage.root + "/"
        for stat in storage.list(folder):
            key = stat.name.removeprefix(prefix)
            if not _is_closed(key + "/"):
                yield TableFile(key, stat.size_bytes, stat.modified_at)
    else:
        yield from _walk_local(storage.root, folder)


def _walk_local(root: str, folder: str) -> Iterator[TableFile]:
    try:
        with os.scandir(os.path.join(root, folder)) as entries:
            found = sorted(entries, key=lambda e: e.name)
    except (FileNotFoundError, NotADirectoryError):
        return
    for entry in found:
        key = f"{folder}/{entry.name}" if folder else entry.name
        if entry.is_symlink():
            continue
        if entry.is_dir(follow_symlinks=False):
            if not _is_closed(key + "/"):
                yield from _walk_local(root, key)
            continue
        try:
            stat = entry.stat(follow_symlinks=False)
        except FileNotFoundError:
            continue
        yield TableFile(key, stat.st_size, datetime.fromtimestamp(stat.st_mtime, UTC))


def _is_closed(key: str) -> bool:
    return key.startswith((f"{DELTA_LOG}/", f"{PENDING}/"))


def is_inside(storage: Storage, key: str) -> bool:
    """Return whether a key is still a file of the table: no link on the way, nothing outside, no excluded folder."""
    parts = key.split("/")
    if key.startswith("/") or ".." in parts or "" in parts or _is_closed(key):
        return False
    if is_remote(storage.root):
        return True
    root = os.path.realpath(storage.root)
    return os.path.realpath(os.path.join(root, key)) == os.path.join(root, *parts)


def older_than(file: TableFile, now: datetime, age: timedelta) -> bool:
    """Return whether a file was last written at least that long ago; False for a time in the future."""
    return now - file.modified_at >= age
