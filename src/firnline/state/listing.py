"""Which checkpoints of state lie in a home, from one listing, without reading any of them."""

from __future__ import annotations

from collections.abc import Mapping, Set
from dataclasses import dataclass
from datetime import datetime
from typing import Literal, TypeAlias

from firnline.errors import CheckpointError
from firnline.state.manifest import CompleteCheckpoint, find_epoch
from firnline.state.snapshot import ABORTED, COMMITTED, METADATA, load, verify_files
from firnline.storage import FileStat, Storage

Status: TypeAlias = Literal["IN_PROGRESS", "COMPLETED", "FAILED"]


@dataclass(frozen=True, slots=True)
class Folder:
    """The folder of one attempt at an epoch: a checkpoint, or run files that later checkpoints may refer to."""

    checkpoint_id: str
    epoch: int
    files: Mapping[str, FileStat]  # by key below the home

    def has(self, name: str) -> bool:
        """Whether a file of this name lies in it."""
        return f"{self.checkpoint_id}/{name}" in self.files

    def find_status(self, named: Set[str] = frozenset()) -> Status | None:
        """What became of its checkpoint; None when none was begun there.

        Where COMMITTED and ABORTED both stand, it is complete only if it is among `named`, those that sinks name.
        """
        if self.has(COMMITTED) and (not self.has(ABORTED) or self.checkpoint_id in named):
            return "COMPLETED"
        if self.has(ABORTED):
            return "FAILED"
        return "IN_PROGRESS" if self.has(METADATA) else None


@dataclass(frozen=True, slots=True)
class CheckpointInfo:
    """One checkpoint, for people. Its size is that of the files in its own folder."""

    checkpoint_id: str
    epoch: int
    status: Status
    shards_done: int  # shards that wrote their metadata
    size_bytes: int
    created_at: datetime  # when its oldest file was written
    modified_at: datetime  # and its newest

    def age_seconds(self, now: datetime) -> float:
        """How long ago its first file was written."""
        return max(0.0, (now - self.created_at).total_seconds())


def list_folders(storage: Storage) -> list[Folder]:
    """Every folder that an id names, oldest epoch first; whatever else lies in the home is left out."""
    start = len(storage.root.rstrip("/")) + 1
    found: dict[str, dict[str, FileStat]] = {}
    for stat in storage.list(""):
        key = stat.name[start:]
        found.setdefault(key.partition("/")[0], {})[key] = stat
    folders = []
    for name, files in sorted(found.items()):
        epoch = find_epoch(name)
        if epoch is not None:
            folders.append(Folder(name, epoch, files))
    return folders


def list_checkpoints(storage: Storage, named: Set[str] = frozenset()) -> list[CheckpointInfo]:
    """Every checkpoint, oldest first. `named` are the ids that sinks name."""
    found = []
    for folder in list_folders(storage):
        status = folder.find_status(named)
        if status is None:
            continue
        times = [stat.modified_at for stat in folder.files.values()]
        found.append(
            CheckpointInfo(
                checkpoint_id=folder.checkpoint_id,
                epoch=folder.epoch,
                status=status,
                shards_done=sum(key.endswith(f"/{METADATA}") and key.count("/") == 2 for key in folder.files),
                size_bytes=sum(stat.size_bytes for stat in folder.files.values()),
                created_at=min(times),
                modified_at=max(times),
            )
        )
    return found


def find_newest_complete(
    storage: Storage, *, up_to_epoch: int | None = None, named: Set[str] = frozenset()
) -> CompleteCheckpoint | None:
    """The newest complete checkpoint, up to an epoch, that can be read and has all its files; None without one."""
    for info in reversed(list_checkpoints(storage, named)):
        if info.status != "COMPLETED" or (up_to_epoch is not None and info.epoch > up_to_epoch):
            continue
        try:
            found = load(storage, info.checkpoint_id, named=info.checkpoint_id in named)
            verify_files(storage, found, deep=False)
        except CheckpointError:  # an older one is the next best
            continue
        return found
    return None
