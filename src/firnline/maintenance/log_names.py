"""Reads the names in the Delta log: the files of the newest version, tombstones within retention, recent commits.

Strict where recovery is tolerant: an unreadable line might name a file, so it stops a deletion. The time of a tombstone
comes from the clock of the writer that removed the file. Therefore every file in a commit whose log file is younger
than the retention, by the storage's clock, counts as named, too.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from typing import Any
from urllib.parse import unquote

import pyarrow as pa
import pyarrow.parquet as pq
from deltalake import DeltaTable
from deltalake.exceptions import DeltaError

from firnline.errors import SinkError
from firnline.names import DELTA_LOG, PINS, commit_key, commit_name
from firnline.sinks.delta.table import Table
from firnline.storage import Storage, is_remote
from firnline.types import Json

_COMMIT = re.compile(r"([0-9]{20})\.json")
_CHECKPOINT = re.compile(r"([0-9]{20})\.checkpoint\.(?:.*\.)?(?:parquet|json)")
_PART = re.compile(r"[0-9]{20}\.checkpoint\.[0-9]+\.[0-9]+\.parquet")  # of a checkpoint in several files
_INTERVAL = re.compile(r"(?:interval\s+)?([0-9]+)\s+(microsecond|millisecond|second|minute|hour|day|week)s?")
DEFAULT_RETENTION = timedelta(days=7)
_HINT = "Nothing was deleted on doubt; read the table with another tool, or restore this file from a backup."


@dataclass(slots=True)
class Tombstone:
    """A file that a commit removed. `deleted_at` None: not in the log."""

    key: str
    deleted_at: datetime | None
    size_bytes: int


@dataclass(slots=True)
class LogTail:
    """The part of checkpoint and commits that was read."""

    version: int
    tombstones: dict[str, Tombstone] = field(default_factory=dict)
    recent: set[str] = field(default_factory=set)  # named by a commit that is younger than the retention
    app_ids: set[str] = field(default_factory=set)


def file_retention(table: Table) -> timedelta:
    """Return how long removed files must stay, from the table's properties; seven days by default."""
    text = table.setting("delta.deletedFileRetentionDuration")
    if text is None:
        return DEFAULT_RETENTION
    found = _INTERVAL.fullmatch(text.strip().lower())
    if found is None:
        raise SinkError(f"delta.deletedFileRetentionDuration is {text!r}, which is no interval", hint=_HINT)
    return timedelta(**{found[2] + "s": int(found[1])})


class LogNames:
    """Reads names from the log of one table. The caller moves the table handle."""

    def __init__(self, storage: Storage, table: Table, options: dict[str, str]) -> None:
        self._storage = storage
        self._table = table
        self._options = options
        root = storage.root
        self._roots = {root, root if is_remote(root) else os.path.realpath(root)}

    def snapshot(self) -> Iterator[str]:
        """Return the keys of the files at the version of the handle."""
        return self._add_keys(self._table.delta)

    def pinned(self, version: int) -> Iterator[str]:
        """Return the keys of the files of one version. Raises SinkError if the log no longer has it."""
        try:
            old = DeltaTable(self._table.uri, version=version, storage_options=self._options or None)
        except (DeltaError, OSError, ValueError) as error:
            raise SinkError(
                f"version {version} of {self._table.uri} is pinned, but the log does not hold it: {error}",
                hint=f"Delete the pin below {PINS}/ if nobody needs that version any more.",
            ) from error
        return self._add_keys(old)

    def _add_keys(self, delta: DeltaTable) -> Iterator[str]:
        for chunk in pa.table(delta.get_add_actions()).column("path").chunks:
            for path in chunk:
                yield from self.keys(path.as_py())

    def keys(self, path: str) -> Iterable[str]:
        """Return the possible names of a log path below the table: as written, and decoded."""
        return dict.fromkeys(key for text in (path, unquote(path)) if (key := self._relative(text)) is not None)

    def _relative(self, path: str) -> str | None:
        path = path.removeprefix("file://")
        for root in self._roots:
            if path.startswith(root + "/"):
                return path[len(root) + 1 :]
        return None if path.startswith("/") or "://" in path else path

    def tail(self, now: datetime, retention: timedelta) -> LogTail:
        """Return tombstones from the newest checkpoint on, and every name in commits within the retention."""
        version = self._table.version
        listing = {s.name.rsplit("/", 1)[-1]: s for s in self._storage.list(DELTA_LOG)}
        checkpoint, parts = _newest_checkpoint(listing)
        found = LogTail(version)
        for action in self._checkpoint_actions(parts):
            self._take(found, action, is_recent=False)
        numbers = sorted(int(m[1]) for m in map(_COMMIT.fullmatch, listing) if m)
        missing = set(range(checkpoint + 1, version + 1)).difference(numbers)
        if missing:
            raise SinkError(f"the log of {self._table.uri} has no version {min(missing)}", hint=_HINT)
        for number in numbers:
            is_recent = now - listing[commit_name(number)].modified_at < retention
            if number > checkpoint or is_recent:
                for action in self._find_commit(number) if number <= checkpoint else self.commit(number):
                    self._take(found, action, is_recent=is_recent, is_old=number <= checkpoint)
        return found

    def _find_commit(self, version: int) -> list[dict[str, Json]]:
        try:
            return self.commit(version)
        except FileNotFoundError:
            return []  # cleaned up since it was listed; the checkpoint includes it

    def _take(self, tail: LogTail, action: dict[str, Json], *, is_recent: bool, is_old: bool = False) -> None:
        if "txn" in action:
            tail.app_ids.add(str(action["txn"]["appId"]))
        for kind in ("add", "remove"):
            if kind not in action:
                continue
            body = action[kind]
            for key in self.keys(str(body["path"])):
                if is_recent:
                    tail.recent.add(key)
                if is_old:
                    continue  # the checkpoint supersedes this commit
                if kind == "add":
                    tail.tombstones.pop(key, None)
                else:
                    tail.tombstones[key] = _tombstone(key, body)

    def named_between(self, after: int, upto: int) -> set[str] | None:
        """Return the keys that the commits after one version name; None if one of them is gone."""
        found: set[str] = set()
        for number in range(after + 1, upto + 1):
            try:
                actions = self.commit(number)
            except FileNotFoundError:
                return None
            for action in actions:
                for kind in ("add", "remove"):
                    if kind in action:
                        found.update(self.keys(str(action[kind]["path"])))
        return found

    def commit(self, version: int) -> list[dict[str, Json]]:
        """Return the actions of one commit, parsed strictly. Raises FileNotFoundError if it does not exist."""
        name = commit_key(version)
        return _parse_lines(self._storage.get(name), name)

    def _checkpoint_actions(self, names: list[str]) -> Iterator[dict[str, Json]]:
        """Yield removes and transactions of one checkpoint, with the sidecars that it names."""
        sidecars: list[str] = []
        for name in names:
            for action in self._file_actions(f"{DELTA_LOG}/{name}"):
                if "sidecar" in action:
                    sidecars.append(str(action["sidecar"]["path"]).rsplit("/", 1)[-1])
                else:
                    yield action
        for name in sidecars:
            yield from self._file_actions(f"{DELTA_LOG}/_sidecars/{name}")

    def _file_actions(self, key: str) -> Iterator[dict[str, Json]]:
        data = self._storage.get(key)
        if key.endswith(".json"):
            yield from _parse_lines(data, key)
            return
        try:
            file = pq.ParquetFile(pa.BufferReader(data))
            kinds = [k for k in ("remove", "txn", "sidecar") if k in file.schema_arrow.names]
            for batch in file.iter_batches(columns=kinds):
                for kind in kinds:
                    column = batch.column(batch.schema.get_field_index(kind))
                    for value in column.filter(column.is_valid()).to_pylist():
                        if value.get("path") or value.get("appId"):
                            yield {kind: value}
        except (pa.ArrowException, OSError) as error:
            raise SinkError(f"{key} cannot be read: {error}", hint=_HINT) from error


def _newest_checkpoint(names: Iterable[str]) -> tuple[int, list[str]]:
    """Return version and files of the newest complete checkpoint; -1 if there is none."""
    found: dict[int, list[str]] = {}
    for name in names:
        match = _CHECKPOINT.fullmatch(name)
        if match is not None:
            found.setdefault(int(match[1]), []).append(name)
    for version in sorted(found, reverse=True):
        whole = [n for n in found[version] if not _PART.fullmatch(n)]
        if whole:
            return version, whole[:1]
        by_count: dict[str, list[str]] = {}
        for name in found[version]:
            by_count.setdefault(name.split(".")[3], []).append(name)
        for count, parts in by_count.items():
            if len(parts) == int(count):
                return version, parts
    return -1, []


def _tombstone(key: str, body: dict[str, Any]) -> Tombstone:
    stamp = body.get("deletionTimestamp")
    try:
        deleted_at = None if stamp is None else datetime.fromtimestamp(stamp / 1000, UTC)
    except (OverflowError, ValueError, OSError):
        deleted_at = None
    return Tombstone(key, deleted_at, int(body.get("size") or 0))


def _parse_lines(data: bytes, name: str) -> list[dict[str, Json]]:
    actions = []
    for line in data.splitlines():
        if not line.strip():
            continue
        try:
            action = json.loads(line)
        except ValueError as error:
            raise SinkError(f"{name} cannot be read: {error}", hint=_HINT) from error
        if not isinstance(action, dict):
            raise SinkError(f"{name} holds a line that is no action", hint=_HINT)
        actions.append(action)
    return actions
