"""Makes the log of a Delta table durable, and finds commit files that a power cut or a full disk cut off.

Nothing may build on a commit that a power failure could still undo, and delta-rs does not fsync. Our own commits are
fsynced when made. Another writer may have been killed before its fsync, so its commit is fsynced before anything builds
on it.

A commit file is lines of JSON, written in this order: commitInfo, files, transactions. A cut inside a line makes the
table unreadable. A cut between two lines does not, and would be worse: the rows exist without their transactions. Every
commit of ours therefore has its number of actions in the first line.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import re
from collections.abc import Sequence

from firnline.errors import NotDurableError, TornCommitError
from firnline.faults import fault_point
from firnline.names import COUNTS_KEY, DELTA_LOG, commit_key, commit_name
from firnline.sinks.delta.log import DeltaLog
from firnline.storage import Storage, confirm_path, fsync_path, is_remote, make_folders
from firnline.types import Json

logger = logging.getLogger(__name__)

_COMMIT = re.compile(r"(\d{20})\.json")
_CHECKPOINT = re.compile(r"(\d{20})\.checkpoint.*\.(?:parquet|json)")
_MOST_NAMED = 10_000  # versions that are named one by one; those of a recovered journal begin far above


class DurableLog:
    """Remembers up to which version this process has made a table's log durable."""

    def __init__(self, uri: str) -> None:
        self._uri = uri
        self._folder = os.path.join(uri, DELTA_LOG)
        self._version = -1

    def forget(self) -> None:
        """Forget a table that is gone: a later one is another table."""
        self._version = -1

    def sync(self, version: int, *, written: bool = False) -> None:
        """Make every commit up to `version` durable. `written`: that one is this process's own.

        Raises:
            NotDurableError: an fsync failed, or the disk holds something else than was written.
        """
        if is_remote(self._uri) or version <= self._version:
            return
        fault_point("delta.sync.before")
        try:
            for name in self._names(version):
                with contextlib.suppress(FileNotFoundError):  # expired and deleted since it was listed
                    path = os.path.join(self._folder, name)
                    own = written and name == commit_name(version)
                    fsync_path(path) if own or not _COMMIT.fullmatch(name) else confirm_path(path)
            self._sync_folders()
        except OSError as error:
            raise NotDurableError(f"the log of {self._uri} is not durable: {error}", table=self._uri) from error
        self._version = version
        fault_point("delta.sync.after")

    def _names(self, version: int) -> list[str]:
        """Return the files of `version` that are not durable yet; after a checkpoint, from there on."""
        if self._version >= 0 and version - self._version <= _MOST_NAMED:
            return [commit_name(number) for number in range(self._version + 1, version + 1)]
        listed = os.listdir(self._folder)
        checkpoints = [(int(m[1]), name) for name in listed if (m := _CHECKPOINT.fullmatch(name))]
        newest = max((number for number, _ in checkpoints if number <= version), default=0)
        commits = [name for name in sorted(listed) if (m := _COMMIT.fullmatch(name)) and newest <= int(m[1]) <= version]
        return [*(name for number, name in checkpoints if number == newest), *commits]

    def sync_checkpoint(self, version: int) -> None:
        """Make Delta's own checkpoint of a version durable, before the commits that it replaces are deleted.

        Raises:
            NotDurableError: an fsync failed.
        """
        if is_remote(self._uri):
            return
        try:
            for name in os.listdir(self._folder):
                match = _CHECKPOINT.fullmatch(name)
                if name == "_last_checkpoint" or (match and int(match[1]) == version):
                    fsync_path(os.path.join(self._folder, name))
            fsync_path(self._folder)
        except OSError as error:
            raise NotDurableError(f"a checkpoint of {self._uri} is not durable: {error}", table=self._uri) from error

    def _sync_folders(self) -> None:
        fsync_path(self._folder)
        if self._version < 0:
            make_folders(self._folder)


_LOOKED_AT = 100  # commits of others, at most, down to one of ours that is whole


def count_actions(files: int, transactions: int) -> dict[str, int]:
    """Return a commit's own counts: the minimum of files that it adds or removes, and transactions."""
    return {"files": files, "transactions": transactions}


def check_whole(storage: Storage, version: int) -> None:
    """Check the newest commits, down to one of ours that is complete: what we build on is durable, and therefore
    complete.

    An empty file is a commit without an action. It is logged and blocks nothing.

    Raises:
        TornCommitError: a commit lacks actions that it counts, or has a line that is no JSON.
    """
    for number in range(version, max(-1, version - _LOOKED_AT), -1):
        try:
            lines = storage.get(_name(number)).splitlines()
        except FileNotFoundError:
            return
        actions = _parse(lines)
        if actions is None:
            raise _error(storage, number, "a line of it is cut off", newest=number == version)
        if not actions:
            logger.warning(
                "commit file is empty: what its writer meant is lost", extra={"file": _path(storage, number)}
            )
            continue
        counts = next((a["commitInfo"].get(COUNTS_KEY) for a in actions if isinstance(a.get("commitInfo"), dict)), None)
        if not isinstance(counts, dict):
            continue  # another writer's, or of a version of ours that did not count
        lacking = _find_lacking(actions, counts)
        if lacking:
            raise _error(storage, number, f"it lacks {lacking}", newest=number == version)
        return


def check_epochs(storage: Storage, version: int, pipeline: str) -> None:
    """Check for an empty commit file that replaced an epoch of a pipeline: the disk lost its content.

    An empty file is harmless if the same epoch was committed again after it: the first commit never took place.

    Raises:
        TornCommitError: rows of an epoch are gone, although later ones were built on it.
    """
    after = _path(storage, version - _LOOKED_AT) if version >= _LOOKED_AT else ""
    if all(stat.size_bytes for stat in storage.list(DELTA_LOG, after) if stat.name.endswith(".json")):
        return  # a listing tells it; the commits need not be read
    later: int | None = None
    empty: int | None = None
    for commit in DeltaLog(storage).backwards(version, _LOOKED_AT):
        if not commit.actions:
            empty = commit.version
            continue
        info = commit.find_info(pipeline)
        if info is None or "checkpoint" not in info:
            continue
        epoch = int(info["epoch"])
        if empty is not None and later is not None and later > epoch + 1:
            raise _error(storage, empty, f"it is empty, and epoch {epoch + 1} is in no other", newest=False)
        later, empty = epoch, None


def find_unreadable(storage: Storage) -> TornCommitError | None:
    """Return why a table cannot be read, if the cause is a torn commit: the newest one after Delta's own checkpoint."""
    log = DeltaLog(storage)
    newest = log.newest_version()
    for number in range(newest, max(log.checkpoint_version(), newest - _LOOKED_AT), -1):
        try:
            actions = _parse(storage.get(_name(number)).splitlines())
        except FileNotFoundError:
            continue
        if actions is None:
            return _error(storage, number, "a line of it is cut off", newest=number == newest)
        if not number and not {"metaData", "protocol"} <= {key for action in actions for key in action}:
            return _error(storage, number, "it lacks what makes a table", newest=number == newest)
    return None


def _parse(lines: Sequence[bytes]) -> list[dict[str, Json]] | None:
    """Return the actions of a commit; None if one is no JSON object."""
    try:
        actions = [json.loads(line) for line in lines if line.strip()]
    except ValueError:
        return None
    return actions if all(isinstance(action, dict) for action in actions) else None


def _find_lacking(actions: Sequence[dict[str, Json]], counts: dict[str, Json]) -> str:
    has = {
        "files": sum("add" in action or "remove" in action for action in actions),
        "transactions": sum("txn" in action for action in actions),
    }
    return ", ".join(f"{counts[kind] - n} of its {kind}" for kind, n in has.items() if n < counts[kind])


def _error(storage: Storage, number: int, reason: str, *, newest: bool) -> TornCommitError:
    path = _path(storage, number)
    hint = f"Restore {path} from a backup: later commits were built on it."
    if newest:
        hint = (
            f"Stop every writer of the table, take the file out of the log, and run again: mv '{path}' '{path}.torn'\n"
            "The commit then never was: Firnline reads the input of its epoch again, other writers must repeat theirs."
        )
    return TornCommitError(
        f"the commit file {path} is torn, as by a power cut or a full disk: {reason}", hint=hint, version=number
    )


def _name(number: int) -> str:
    return commit_key(number)


def _path(storage: Storage, number: int) -> str:
    return f"{storage.root}/{_name(number)}"
