"""Makes the log of a Delta table on local disk durable: delta-rs does not fsync.

Nothing may build on a commit that a power failure could still undo. Our own commits are fsynced when made. Another
writer may have been killed before its fsync, so its commit is fsynced before anything builds on it.
"""

from __future__ import annotations

import contextlib
import os
import re

from firnline.errors import NotDurableError
from firnline.faults import fault_point
from firnline.names import DELTA_LOG, commit_name
from firnline.storage import confirm_path, fsync_path, is_remote, make_folders

_COMMIT = re.compile(r"(\d{20})\.json")
_CHECKPOINT = re.compile(r"(\d{20})\.checkpoint.*\.(?:parquet|json)")


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
        if self._version >= 0:
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
