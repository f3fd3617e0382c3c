"""Reads the Delta log: which commits are ours and what they carry. Writes nothing.

A commit of Firnline carries, beside its Add actions:
- Txn `firnline:<pipeline>` = epoch, `firnline-gen:<pipeline>` = generation, `firnline-entry:<pipeline>` = the
  first 63 bits of the ledger entry's checksum; all without lastUpdated, so they never expire;
- Txn `firnline-key:<pipeline>` = a number for the columns of the key, if rows are upserted;
- Txn `blizzard:<base64 JSON>` on tables that Firnline created: the interchange format;
- in commitInfo, the key `firnline`: the checkpoint, and name and checksum of the ledger entry.
"""

from __future__ import annotations

import base64
import binascii
import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import UTC, datetime

import pyarrow as pa
import pyarrow.parquet as pq

from firnline.checkpoint.codec import FORMAT, canonical, check_format, checksum, parse
from firnline.errors import DamagedError
from firnline.names import BLIZZARD, DELTA_LOG, INFO_KEY, commit_key
from firnline.storage import Storage
from firnline.types import Json

_POINTER = f"{DELTA_LOG}/_last_checkpoint"
_COMMIT = re.compile(r"(\d{20})\.json")
# One file, one of several parts, or one that names files beside it: transactions stand in these very files.
_CHECKPOINT = re.compile(r"(\d{20})\.checkpoint(?:\.(\d{10})\.(\d{10})|\.[0-9a-f-]{36})?\.(parquet|json)")


@dataclass(frozen=True, slots=True)
class LogCommit:
    """One commit file, parsed."""

    version: int
    actions: list[dict[str, Json]]

    def txns(self) -> Iterator[dict[str, Json]]:
        return (action["txn"] for action in self.actions if "txn" in action)

    def info(self, pipeline: str) -> dict[str, Json] | None:
        """Return this commit's record of a pipeline; None if it is not one of its commits. Raises DamagedError if
        unreadable."""
        for action in self.actions:
            raw = action.get("commitInfo", {}).get(INFO_KEY)
            if raw is not None:
                value = parse(raw.encode() if isinstance(raw, str) else canonical(raw), f"commit {self.version}")
                if isinstance(value, dict) and value.get("pipeline") == pipeline:
                    return value
        return None

    def find_info(self, pipeline: str) -> dict[str, Json] | None:
        """Like `info`, but None if it is unreadable."""
        try:
            return self.info(pipeline)
        except DamagedError:
            return None

    def time(self) -> str:
        """The time of the commit, RFC 3339; empty if it has none."""
        for action in self.actions:
            stamp = action.get("commitInfo", {}).get("timestamp")
            if stamp is not None:
                return datetime.fromtimestamp(stamp / 1000, UTC).isoformat()
        return ""

    def blizzard(self) -> str | None:
        """The interchange payload, still encoded."""
        return next((str(t["appId"]) for t in self.txns() if str(t["appId"]).startswith(BLIZZARD)), None)


@dataclass(frozen=True, slots=True)
class DeltaCheckpoint:
    """A complete checkpoint that Delta itself keeps of a table's log: its version and its files."""

    version: int
    names: tuple[str, ...]


class DeltaLog:
    """The commit files of one table, newest first."""

    def __init__(self, storage: Storage) -> None:
        self._storage = storage

    def read(self, version: int) -> LogCommit | None:
        """Return one commit; None if it does not exist (not yet, or cleaned up)."""
        try:
            data = self._storage.get(commit_key(version))
        except FileNotFoundError:
            return None
        actions = []
        for line in data.splitlines():
            try:
                action = json.loads(line)
            except ValueError:
                continue  # one damaged line does not hide the others; its content has other copies
            if isinstance(action, dict):
                actions.append(action)
        return LogCommit(version, actions)

    def newest_version(self) -> int:
        """Return the number of the newest commit file; -1 if there is none."""
        for names in self._listings():
            found = [int(match[1]) for name in names if (match := _COMMIT.fullmatch(name))]
            if found:
                return max(found)
        return -1

    def find_checkpoint(self) -> DeltaCheckpoint | None:
        """Return Delta's newest complete checkpoint in the storage; None if there is none."""
        for names in self._listings():
            found = complete_checkpoints(names)
            if found:
                return max(found, key=lambda checkpoint: checkpoint.version)
        return None

    def checkpoint_version(self) -> int:
        """Return the version of Delta's newest checkpoint; -1 if there is none."""
        found = self.find_checkpoint()
        return found.version if found else -1

    def read_checkpoint(self) -> bytes:
        """Return Delta's newest checkpoint, of one file."""
        found = self.find_checkpoint()
        assert found is not None
        return self._storage.get(f"{DELTA_LOG}/{found.names[0]}")

    def checkpoint_txns(self, checkpoint: DeltaCheckpoint) -> Iterator[dict[str, Json]]:
        """Yield the transactions in a checkpoint: those of commits whose files may be cleaned up.

        Raises:
            DamagedError: a file of it cannot be read.
        """
        for name in checkpoint.names:
            data = self._storage.get(f"{DELTA_LOG}/{name}")
            if name.endswith(".json"):
                yield from (a["txn"] for line in data.splitlines() if "txn" in (a := parse(line, name)))
                continue
            try:
                for batch in pq.ParquetFile(pa.BufferReader(data)).iter_batches(columns=["txn"]):
                    yield from (row for row in batch.column("txn").to_pylist() if row and row["appId"])
            except (pa.ArrowException, OSError, KeyError) as error:
                raise DamagedError(f"{self._storage.root}/{DELTA_LOG}/{name} cannot be read", what=name) from error

    def _listings(self) -> Iterator[list[str]]:
        """Yield the log's listing from Delta's newest checkpoint on, then the full listing if that is not enough.

        The pointer to that checkpoint is only a cache: it may be missing, damaged, or wrong.
        """
        try:
            hint = int(parse(self._storage.get(_POINTER), "_last_checkpoint")["version"])
            yield self._names(f"{self._storage.root}/{DELTA_LOG}/{hint:020d}")
        except (FileNotFoundError, DamagedError, KeyError, TypeError, ValueError):
            pass
        yield self._names("")

    def _names(self, after: str) -> list[str]:
        return [stat.name.rsplit("/", 1)[-1] for stat in self._storage.list(DELTA_LOG, after)]

    def backwards(self, version: int, limit: int | None = None) -> Iterator[LogCommit]:
        """Yield commits from `version` down, at most `limit`, until the log has been cleaned up."""
        lowest = -1 if limit is None else max(-1, version - limit)
        for number in range(version, lowest, -1):
            commit = self.read(number)
            if commit is None:
                return
            yield commit


def complete_checkpoints(names: list[str]) -> list[DeltaCheckpoint]:
    """Return the checkpoints of which a listing of the log has every file."""
    parts: dict[tuple[int, int], list[str]] = {}
    found = []
    for match in (match for name in names if (match := _CHECKPOINT.fullmatch(name))):
        if match[2]:
            parts.setdefault((int(match[1]), int(match[3])), []).append(match[0])
        else:
            found.append(DeltaCheckpoint(int(match[1]), (match[0],)))
    whole = [(version, files) for (version, count), files in parts.items() if len(files) == count]
    return found + [DeltaCheckpoint(version, tuple(files)) for version, files in whole]


def encode_blizzard(source_state: Json, delta_version: int, extra: dict[str, Json]) -> str:
    """Return the app id with the interchange payload. `extra` holds our own added fields."""
    state = {**extra, "schema_version": FORMAT, "source_state": source_state, "delta_version": delta_version}
    state["checksum"] = checksum(canonical(state))
    return BLIZZARD + base64.b64encode(canonical(state)).decode()


def decode_blizzard(app_id: str) -> dict[str, Json]:
    """Parse the interchange payload, ours or another tool's; unknown fields are ignored.

    Raises:
        DamagedError: not base64, not JSON, of another shape, or with a wrong checksum.
        NewerFormatError: a newer `schema_version`.
    """
    what = "a blizzard checkpoint"
    try:
        raw = base64.b64decode(app_id.removeprefix(BLIZZARD), validate=True)
    except (binascii.Error, ValueError) as error:
        raise DamagedError(f"{what} is not base64", what=what) from error
    value = parse(raw, what)
    if not isinstance(value, dict):
        raise DamagedError(f"{what} is not an object", what=what)
    check_format(value, what, "schema_version")
    state = value.get("source_state")
    if not isinstance(state, dict) or not isinstance(state.get("files"), dict) or "last_committed_file" not in state:
        raise DamagedError(f"{what} has no source state", what=what)
    named = value.pop("checksum", None)  # only ours carries one
    if named is not None and checksum(canonical(value)) != named:
        raise DamagedError(f"{what} does not match its checksum", what=what)
    return value
