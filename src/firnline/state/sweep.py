"""Deletes what no checkpoint of state needs any more, and never anything that one might.

What stays: every checkpoint that is marked, the newest complete ones, every folder with an epoch at or above
`keep_from_epoch`, every file that any of these checkpoints refers to (in whichever folder it lies), and everything
younger than the grace period. Marks are collected before this begins to list, and only what was listed is deleted:
what is written meanwhile belongs to an epoch at or above `keep_from_epoch`, and what it refers to is either as new
or is referred to by the marked checkpoint that it stands on.

Of all that goes, every COMMITTED goes first; then the metadata of shards, the files, the global metadata, and ABORTED
at the very end. So a kill in between never leaves a checkpoint that says it is complete and lacks a file, and a late
`commit` finds either ABORTED or no metadata. The next sweep ends what this one began.
"""

from __future__ import annotations

import contextlib
import os
import posixpath
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timedelta

from firnline.errors import ConfigError, DamagedError, StateIncompleteError
from firnline.faults import fault_point
from firnline.names import ABORTED, COMMITTED, METADATA
from firnline.state.manifest import SnapshotRef, check_id
from firnline.state.snapshot import Folder, list_folders, load
from firnline.storage import FileStat, Storage, is_remote
from firnline.types import Json


@dataclass(frozen=True, slots=True)
class Marks:
    """What must stay: checkpoints by id, with their digest if known, and all newer epochs.

    `keep_from_epoch` is no newer than the epoch of any snapshot that a run may depend on or go back to.
    """

    ids: Mapping[str, str | None]
    keep_from_epoch: int

    @classmethod
    def collect(
        cls,
        floor: int,
        operators: Iterable[str],
        live: Iterable[Mapping[str, Json]],
        pinned: Iterable[Mapping[str, Json]] = (),
    ) -> Marks:
        """Mark everything that the `state` of checkpoints refers to.

        `live` are the checkpoints of every sink, including lagging ones, of every stored version from the floor on, and
        of the start of the current run. The state of `operators` builds on their snapshots, so everything written since
        the oldest of these stays, and everything if one of them has no snapshot yet. `pinned` are those of savepoints
        and pins: they stay, but nothing builds on them.

        Raises:
            DamagedError: a reference cannot be read; then nothing may be swept.
        """
        states = [{name: SnapshotRef.from_json(ref) for name, ref in state.items()} for state in live]
        kept = [SnapshotRef.from_json(ref) for state in pinned for ref in state.values()]
        ids = {ref.checkpoint: ref.digest for ref in (*kept, *(ref for state in states for ref in state.values()))}
        built_on = [state[name].epoch if name in state else 0 for name in operators for state in states or [{}]]
        return cls(ids, min([floor, *built_on]))


@dataclass(frozen=True, slots=True)
class Swept:
    """What was deleted, or would be."""

    checkpoints: tuple[str, ...] = ()  # checkpoints whose metadata was deleted
    paths: tuple[str, ...] = ()  # in the order of deletion
    size_bytes: int = 0
    kept: tuple[str, ...] = ()  # complete checkpoints whose files are kept
    damaged: Mapping[str, str] = field(default_factory=dict)  # unmarked ones that cannot be read, and why


def sweep(
    storage: Storage,
    marks: Marks,
    now: datetime,
    grace_secs: float,
    keep_checkpoints: int,
    keep_aborted_secs: float,
    dry_run: bool = False,
    *,
    absent_marks: bool = False,
    referenced: Iterable[str] = (),
    delete: Callable[[Sequence[str]], None] | None = None,
) -> Swept:
    """Delete unneeded files below a home.

    Args:
        storage: The home.
        marks: What must stay, collected before this call.
        now: The time.
        grace_secs: Nothing younger is deleted.
        keep_checkpoints: This many of the newest complete checkpoints stay, marked or not.
        keep_aborted_secs: How long aborted and partial checkpoints are kept for inspection.
        dry_run: Delete nothing; return what would be deleted.
        absent_marks: A marked checkpoint may be missing, as in a remote tier that does not have it yet.
        referenced: Other files that stay: those of checkpoints on their way here.
        delete: Deletes the given files, with `delete_files`, after it has made sure that nothing needs them.

    Raises:
        ConfigError: a mark is no id, or a number is below 0.
        StateIncompleteError: a marked checkpoint is not complete; nothing was deleted.
        DamagedError: a marked checkpoint is damaged; nothing was deleted.
        NewerFormatError: a newer Firnline works here; nothing was deleted.
        OSError: some files are deleted, the rest is left for the next sweep.
    """
    for checkpoint in marks.ids:
        check_id(checkpoint)
    if min(grace_secs, keep_checkpoints, keep_aborted_secs) < 0:
        raise ConfigError("a sweep cannot keep fewer than no checkpoints, or anything for less than no time")
    folders = list_folders(storage)
    old = now - timedelta(seconds=grace_secs)
    plan = _Plan(storage, marks, old, min(old, now - timedelta(seconds=keep_aborted_secs)))
    plan.keep_marked(folders, absent_marks=absent_marks)
    plan.keep_others(folders, keep_checkpoints)
    plan.referenced.update(referenced)
    for folder in folders:
        plan.judge(folder)
    doomed = plan.doomed()
    if doomed and not dry_run:
        (delete or (lambda keys: delete_files(storage, keys)))(list(doomed))
    return Swept(
        checkpoints=tuple(sorted(plan.checkpoints)),
        paths=tuple(doomed),
        size_bytes=sum(stat.size_bytes for stat in doomed.values()),
        kept=tuple(sorted(plan.kept)),
        damaged=plan.damaged,
    )


class _Plan:
    """What is kept and what is deleted. `old` and `aborted_old` are the times before which things are deleted."""

    def __init__(self, storage: Storage, marks: Marks, old: datetime, aborted_old: datetime) -> None:
        self._storage = storage
        self._marks = marks
        self._old = old
        self._aborted_old = aborted_old
        self._phases: tuple[dict[str, FileStat], ...] = ({}, {}, {}, {}, {})
        self.kept: set[str] = set()
        self.referenced: set[str] = set()
        self.checkpoints: set[str] = set()
        self.damaged: dict[str, str] = {}

    def keep_marked(self, folders: list[Folder], *, absent_marks: bool) -> None:
        """Keep marked checkpoints and everything that they refer to. An unreadable one stops the sweep."""
        complete = {folder.checkpoint_id for folder in folders if folder.has(COMMITTED)}
        for checkpoint, digest in self._marks.ids.items():
            if checkpoint in complete or not absent_marks:
                self._keep(checkpoint, digest, named=True)

    def keep_others(self, folders: list[Folder], keep_checkpoints: int) -> None:
        """Keep the newest complete checkpoints and those too new to be swept: kept ones must stay complete."""
        left = keep_checkpoints
        for folder in reversed(folders):
            if folder.find_status(self._marks.ids.keys()) != "COMPLETED":
                continue
            new = folder.epoch >= self._marks.keep_from_epoch or _modified_at(folder) > self._old
            if folder.checkpoint_id not in self.kept and (left > 0 or new):
                try:
                    self._keep(folder.checkpoint_id, None, named=False)
                except (DamagedError, StateIncompleteError) as error:  # nothing names it, and nothing could use it
                    self.damaged[folder.checkpoint_id] = error.message
                    continue
            left -= 1

    def _keep(self, checkpoint: str, digest: str | None, *, named: bool) -> None:
        self.referenced.update(load(self._storage, checkpoint, digest, named=named).files())
        self.kept.add(checkpoint)

    def judge(self, folder: Folder) -> None:
        """Decide what to delete of a folder."""
        kept = folder.checkpoint_id in self.kept
        if folder.epoch >= self._marks.keep_from_epoch or (folder.checkpoint_id in self._marks.ids and not kept):
            return
        metadata = {key: stat for key, stat in folder.files.items() if _turn(key) != _FILES}
        if metadata and not kept:
            failed = folder.find_status() in ("FAILED", "IN_PROGRESS")
            if _modified_at(folder) > (self._aborted_old if failed else self._old):
                return  # kept for inspection, with all files
            self.checkpoints.add(folder.checkpoint_id)
            for key, stat in metadata.items():
                self._phases[_turn(key)][key] = stat
        for key, stat in folder.files.items():
            if key not in metadata and key not in self.referenced and stat.modified_at <= self._old:
                self._phases[_FILES][key] = stat

    def doomed(self) -> dict[str, FileStat]:
        """Return everything to delete, in the required order."""
        return {key: stat for phase in self._phases for key, stat in phase.items()}


_COMMITTED, _SHARDS, _FILES, _METADATA, _ABORTED = range(5)


def delete_files(storage: Storage, keys: Iterable[str]) -> None:
    """Delete files of a home in the required order, then empty folders."""
    ordered = sorted(keys, key=_turn)
    for key in ordered:
        _delete(storage, key)
    _drop_folders(storage, ordered)


def _turn(key: str) -> int:
    """Return the position of a file in the order of deletion."""
    name = key.partition("/")[2]
    if name in (COMMITTED, METADATA, ABORTED):
        return {COMMITTED: _COMMITTED, METADATA: _METADATA, ABORTED: _ABORTED}[name]
    return _SHARDS if posixpath.basename(name) == METADATA else _FILES


def _modified_at(folder: Folder) -> datetime:
    return max(stat.modified_at for stat in folder.files.values())


def _delete(storage: Storage, key: str) -> None:
    fault_point("state.sweep.before")
    storage.delete(key)
    fault_point("state.sweep.after")


def _drop_folders(storage: Storage, keys: Iterable[str]) -> None:
    """Delete folders of a local home that are empty now."""
    if is_remote(storage.root):
        return
    for folder in sorted({above for key in keys for above in _above(key)}, reverse=True):
        with contextlib.suppress(OSError):
            os.rmdir(os.path.join(storage.root, folder))


def _above(key: str) -> Iterator[str]:
    while key := posixpath.dirname(key):
        yield key
