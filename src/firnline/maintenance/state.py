"""Deletes operator state that is no longer needed, at home and in the remote tier.

Before it lists any file, the sweep collects what must stay:
- the state that each sink names: for the deciding sink with and without pending units, for a sink that lags the ledger
  entry of its epoch;
- the state of every ledger entry from the floor on, and of every copy from there on in the store and the tiers;
- the state that pins of savepoints and of active restores name;
- the state that the active run resumed from, if it is older, by its pin.
Everything newer than the oldest of these snapshots stays too, which is more than any run has in flight. An unreadable
ledger or pin might name anything: then nothing is deleted.

A rollback reaches back to the floor at most, so it needs nothing that is deleted here. A restore may need it.
Therefore the deletion is declared in the deciding table's log (`sweeps`), and only if no history edit and no pin has
appeared meanwhile.
"""

from __future__ import annotations

import contextlib
import logging
import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime
from typing import Protocol, TypeAlias

from firnline.checkpoint.ledger import HISTORY_EDITS, Ledger
from firnline.errors import CheckpointError, SinkError
from firnline.graph import stateful
from firnline.maintenance.gc import finished_notes
from firnline.maintenance.references import is_live, read_pins
from firnline.names import committed_key, temporary_name
from firnline.options import PipelineOptions
from firnline.sinks.base import Sink
from firnline.sinks.delta.sink import as_delta
from firnline.sinks.delta.sweeps import Intent, Sweeper, SweepLog
from firnline.sinks.delta.table import Table
from firnline.state.home import StateHome
from firnline.state.manifest import SnapshotRef
from firnline.state.remote import Replica
from firnline.state.snapshot import exists, load, load_with_texts
from firnline.state.sweep import Marks, Swept, delete_files, sweep
from firnline.storage import Storage
from firnline.stores.tiers import CopyStore
from firnline.types import Json

logger = logging.getLogger(__name__)

GRACE_SECONDS = 86_400.0
LOOKS = 3  # attempts while the history changes; then the next sweep does it
STANDS_ON = "stands-on"  # the kind of a pin that names the state that the active run resumed from
REMOTE = "remote:"  # before the name of a file in the remote tier
RUN_GRACE_SECONDS = 900.0  # for a run's own sweeps: it knows what it has in flight, others may be a little behind


Delete: TypeAlias = Callable[[Sequence[str]], None]


class Copies(Protocol):
    """The copies of checkpoints."""

    @property
    def stores(self) -> Sequence[CopyStore]: ...


class Pipeline(Protocol):
    """The parts of a pipeline that a sweep needs. No other thread may use the sinks meanwhile."""

    @property
    def options(self) -> PipelineOptions: ...

    @property
    def sinks(self) -> tuple[Sink, ...]: ...

    @property
    def ledger(self) -> Ledger: ...

    @property
    def storage(self) -> Storage: ...

    @property
    def state_home(self) -> StateHome: ...

    @property
    def recorder(self) -> Copies: ...


@dataclass(frozen=True, slots=True)
class StateSwept:
    """What was deleted in one home of the state; in a dry run, what would be."""

    home: str
    tier: str  # home, or remote
    dry_run: bool
    checkpoints: int = 0
    files: int = 0
    size_bytes: int = 0
    kept: int = 0  # complete checkpoints that stay
    notes: tuple[str, ...] = ()


def sweep_state(
    parts: Pipeline,
    *,
    grace_seconds: float = GRACE_SECONDS,
    dry_run: bool = False,
    replica: Replica | None = None,
) -> list[StateSwept]:
    """Sweep the state of a pipeline: its home, then the remote tier. Safe beside a run, and at every kill point.

    The remote tier is swept through `replica`, which belongs to the run that copies there. Without one, it is swept
    only while no run may be active.

    Args:
        parts: The pipeline's parts, for this call alone: a run opens separate ones.
        grace_seconds: Files younger than this, by the home's own clock, stay.
        dry_run: Delete nothing, and return what would be deleted.

    Raises:
        CheckpointError: the ledger, a pin or a checkpoint that must stay cannot be read; nothing more was deleted.
        SinkError: a sink or a home cannot be read or written; only unneeded files were deleted.
    """
    try:
        for _ in range(LOOKS):
            with contextlib.suppress(_MovedError):
                found = _sweep(parts, grace_seconds, dry_run=dry_run, replica=replica)
                break
        else:
            note = f"left alone: the history of {parts.options.name} or its pins changed each time it was looked at"
            found = [StateSwept(parts.state_home.storage.root, "home", dry_run, notes=(note,))]
    except OSError as error:
        raise SinkError(f"the state of {parts.options.name!r} cannot be swept: {error}") from error
    for one in found:
        facts = {"home": one.home, "checkpoints": one.checkpoints, "files": one.files, "size_bytes": one.size_bytes}
        logger.info("state swept", extra=facts)
    return found


def _sweep(parts: Pipeline, grace_seconds: float, *, dry_run: bool, replica: Replica | None) -> list[StateSwept]:
    home, declared = parts.state_home, _Declared(parts)
    notes = [] if dry_run else finished_notes(declared.finish_others())
    needed = find_needed(parts)
    declared.pinned = needed.pinned
    found = [_sweep_home(parts, home, needed, grace_seconds, dry_run=dry_run, delete=declared.delete)]
    found[0] = replace(found[0], notes=(*notes, *found[0].notes))
    if home.fallback is not None:
        limits = _Limits(grace_seconds, dry_run)
        found.append(_sweep_remote(parts, home, needed, limits, replica, declared.delete_remote))
    return found


class _MovedError(Exception):
    """A history edit or a pin appeared while a sweep collected what must stay."""


@dataclass(frozen=True, slots=True)
class _Limits:
    grace_seconds: float
    dry_run: bool


class _Declared:
    """Deletes state files after declaring them in the deciding table's log.

    The version is read before the pins and the sinks, so every later history edit is seen as a commit.
    """

    def __init__(self, parts: Pipeline) -> None:
        self._parts = parts
        self._sink = as_delta(parts.sinks[0])
        self._seen = self._sink.table.version if self._sink.table.refresh() else None
        self.pinned: list[dict[str, Json]] = []
        log = SweepLog(parts.storage, self._sink.table, parts.options.name)
        self._sweeper = Sweeper(log, "a sweep of state", self._exists, self._delete)

    def finish_others(self) -> list[Intent]:
        """Finish the declared batches of dead or stalled sweeps."""
        found = self._sweeper.finish_open() if self._seen is not None else []
        self._seen = self._sink.table.version if self._sink.table.refresh() else None
        return found

    def delete(self, keys: Sequence[str]) -> None:
        """Delete files of the home.

        Raises:
            _MovedError: the history or the pins changed meanwhile; nothing was deleted.
        """
        if not self._sweeper.sweep(keys, self._is_unneeded):
            raise _MovedError
        self._sink.table.refresh()

    def delete_remote(self, keys: Sequence[str]) -> None:
        """Delete files of the remote tier. Raises the errors of `delete`."""
        self.delete([REMOTE + key for key in keys])

    def _is_unneeded(self) -> bool:
        if self._seen is None or not self._sink.table.refresh() or _state_pins(self._parts) != self.pinned:
            return False
        for version in range(self._seen + 1, self._sink.table.version + 1):
            commit = self._sink.log.read(version)
            info = commit.find_info(self._parts.options.name) if commit is not None else {"kind": HISTORY_EDITS[0]}
            if info is not None and info.get("kind") in HISTORY_EDITS:
                return False
        return True

    def _where(self, name: str) -> tuple[Storage, str]:
        home = self._parts.state_home
        if name.startswith(REMOTE):
            return (home.fallback or home).storage, name.removeprefix(REMOTE)
        return home.storage, name

    def _exists(self, name: str) -> bool:
        if name.startswith(REMOTE) and self._parts.state_home.fallback is None:
            return False  # the spec no longer has a remote tier
        return exists(*self._where(name))

    def _delete(self, names: Sequence[str]) -> None:
        for of_remote in (False, True):
            found = [self._where(name) for name in names if name.startswith(REMOTE) == of_remote]
            if found:
                delete_files(found[0][0], [key for _, key in found])


# -- what must stay -----------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Needed:
    """What must stay; `tip` is the state of the newest epochs, which every run needs."""

    marks: Marks
    tip: frozenset[str] = frozenset()
    pinned: list[dict[str, Json]] = field(default_factory=list)
    notes: tuple[str, ...] = ()  # problems that were skipped on the way


def find_needed(parts: Pipeline) -> Needed:
    """Collect what must stay.

    Raises:
        CheckpointError: the ledger has a hole, or a pin cannot be read.
    """
    notes: list[str] = []
    pins = _state_pins(parts)  # before the sinks: the commit of a restore names the files before it deletes the pin
    epochs = list(_lagging(parts, notes))
    newest, committed = parts.sinks[0].load(), parts.sinks[0].load_committed()
    if committed.exists:
        parts.sinks[0].make_durable()  # its floor decides what is deleted
    if committed.checkpoint is None or newest.checkpoint is None:
        return Needed(Marks({}, 0), pinned=pins)  # an epoch may be in flight, and nothing distinguishes it
    floor = committed.checkpoint.floor
    live: list[Mapping[str, Json]] = [newest.checkpoint.state, committed.checkpoint.state]
    for entry, _ in parts.ledger.entries(newest.entry):
        if entry.epoch < min([floor, *epochs]):
            break
        live.append(entry.checkpoint.state)
    live += _copied(parts, floor, notes)
    live += [pin["state"] for pin in pins if pin.get("kind") == STANDS_ON]
    pinned = [pin["state"] for pin in pins if pin.get("kind") != STANDS_ON]
    names = [operator.name for operator in stateful(parts.options)]
    tip = Marks.collect(floor, names, live[:2]).ids
    return Needed(Marks.collect(floor, names, live, pinned), frozenset(tip), pins, tuple(notes))


def _state_pins(parts: Pipeline) -> list[dict[str, Json]]:
    pins = read_pins(parts.storage)
    mine = [pin for pin in pins if pin.get("pipeline") == parts.options.name]
    return [pin for pin in mine if pin.get("state") or pin.get("kind") == STANDS_ON]


def _lagging(parts: Pipeline, notes: list[str]) -> Iterator[int]:
    """Yield the epochs of the further sinks. The floor is no newer than any of them, even of an unreadable one."""
    for sink in parts.sinks[1:]:
        try:
            yield sink.load().epoch
        except SinkError as error:
            notes.append(f"sink {sink.name} was passed over: {error.message}")


def _copied(parts: Pipeline, floor: int, notes: list[str]) -> Iterator[Mapping[str, Json]]:
    """Yield the contents of store and tiers from the floor on. They are copies of ledger entries, so one may be
    missing."""
    for store in parts.recorder.stores:
        try:
            yield from (record.checkpoint.state for record in store.load_since(floor))
        except (OSError, CheckpointError) as error:
            notes.append(f"the {store.tier} copy {store.location} was passed over: {error}")


def find_doomed_state(parts: Pipeline, refs: Iterable[SnapshotRef]) -> Intent | None:
    """Return a sweep that deletes, or is about to delete, files of these snapshots. Called once they are pinned."""
    names: set[str] = set()
    for ref in refs:
        for home in (parts.state_home, parts.state_home.fallback):
            if home is not None:
                with contextlib.suppress(CheckpointError):  # the other home has it
                    names.update(_names_of(home.storage, ref))
    log = SweepLog(parts.storage, Table(parts.storage.root, parts.options.home.storage_options), parts.options.name)
    return log.find_after_pin(names | {REMOTE + name for name in names}) if log.table.refresh() else None


def _names_of(storage: Storage, ref: SnapshotRef) -> set[str]:
    """Return every file of a snapshot. Raises CheckpointError if it cannot be read."""
    complete, texts = load_with_texts(storage, ref.checkpoint, ref.digest)
    return {*complete.files(), *texts}


# -- the homes ----------------------------------------------------------------------------------------


def _sweep_home(
    parts: Pipeline, home: StateHome, needed: Needed, grace_seconds: float, *, dry_run: bool, delete: Delete
) -> StateSwept:
    storage, notes = home.storage, list(needed.notes)
    if _is_empty(storage):
        return StateSwept(storage.root, "home", dry_run, notes=needed.notes)
    absent = {checkpoint for checkpoint in needed.marks.ids if not _has(home, checkpoint)}
    remote = {checkpoint for checkpoint in absent if home.fallback is not None and _has(home.fallback, checkpoint)}
    lost = absent - remote - needed.tip  # unusable in any case; nothing is deleted if the tip is among them
    if remote:
        notes.append(f"{len(remote)} checkpoint(s) of state are in the remote tier alone")
    if lost:
        notes.append(f"{len(lost)} checkpoint(s) of state are gone: one cannot go back to their epochs")
    ids = {checkpoint: digest for checkpoint, digest in needed.marks.ids.items() if checkpoint not in lost}
    marks = Marks(ids, needed.marks.keep_from_epoch)
    kept = parts.options.checkpoint
    swept = sweep(
        storage,
        marks,
        _now(storage),
        grace_seconds,
        kept.keep_checkpoints,
        kept.keep_aborted_secs,
        dry_run,
        absent_marks=bool(remote) and absent <= remote | lost,
        delete=delete,
    )
    return _report(storage, "home", swept, dry_run=dry_run, notes=notes)


def _sweep_remote(
    parts: Pipeline, home: StateHome, needed: Needed, limits: _Limits, replica: Replica | None, delete: Delete
) -> StateSwept:
    assert home.fallback is not None
    storage, kept, dry_run, marks = home.fallback.storage, parts.options.checkpoint, limits.dry_run, needed.marks
    if _is_empty(storage):
        return StateSwept(storage.root, "remote", dry_run)
    keep = (limits.grace_seconds, kept.keep_checkpoints, kept.keep_aborted_secs)
    coming = _referenced_at_home(home, marks)
    if replica is not None and not dry_run:
        swept = replica.sweep_remote(marks, _now(storage), *keep, coming, delete)
        return _report(storage, "remote", swept, dry_run=dry_run, notes=[])
    # One process both copies to it and sweeps it: otherwise one process could delete a file that another relies on.
    if not dry_run and is_live(parts.storage, parts.options.name, parts.sinks[0].load_committed().generation):
        note = "left alone: a run may be copying there, and sweeps it itself"
        return StateSwept(storage.root, "remote", dry_run, notes=(note,))
    swept = sweep(storage, marks, _now(storage), *keep, dry_run, absent_marks=True, referenced=coming, delete=delete)
    return _report(storage, "remote", swept, dry_run=dry_run, notes=[])


def _referenced_at_home(home: StateHome, marks: Marks) -> set[str]:
    """Return the files of marked checkpoints at home: a run that copies them relies on the existing files."""
    found: set[str] = set()
    for checkpoint, digest in marks.ids.items():
        with contextlib.suppress(CheckpointError):  # not at home, or damaged: no run copies it from there
            found.update(load(home.storage, checkpoint, digest).files())
    return found


def _report(storage: Storage, tier: str, swept: Swept, *, dry_run: bool, notes: list[str]) -> StateSwept:
    damaged = [f"checkpoint {checkpoint} of state: {problem}" for checkpoint, problem in swept.damaged.items()]
    return StateSwept(
        home=storage.root,
        tier=tier,
        dry_run=dry_run,
        checkpoints=len(swept.checkpoints),
        files=len(swept.paths),
        size_bytes=swept.size_bytes,
        kept=len(swept.kept),
        notes=(*notes, *damaged),
    )


def _has(home: StateHome, checkpoint: str) -> bool:
    return exists(home.storage, committed_key(checkpoint))


def _is_empty(storage: Storage) -> bool:
    return next(iter(storage.list("")), None) is None


def _now(storage: Storage) -> datetime:
    """Return the time of the clock that stamps the home's files, which may differ from this machine's."""
    key = temporary_name(uuid.uuid4().hex)
    storage.put(key, b"")
    try:
        return storage.stat(key).modified_at
    finally:
        storage.delete(key)
