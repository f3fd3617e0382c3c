"""Operator state in a savepoint: its files, their copies, and how a restore puts them into the pipeline's home.

The folder `state/` of a savepoint with copies has the layout and names of a home of state. State files never change and
their names are never reused, so restoring them overwrites nothing.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace

from firnline.checkpoint.ledger import Ledger
from firnline.errors import CheckpointError, DamagedError, RollbackRefusedError
from firnline.faults import fault_point
from firnline.history.savepoints.files import Progress, copy_file, each, sha256_of
from firnline.history.savepoints.format import SavedBytes, SavedState, Savepoint
from firnline.history.state import StateCheck, check_state, refs_of
from firnline.maintenance.state import REMOTE, find_doomed_state
from firnline.maintenance.survey import is_inside
from firnline.names import LEDGER, STATE, saved_state_key
from firnline.run.open_pipeline import OpenPipeline
from firnline.sinks.base import Head
from firnline.sinks.delta.sink import as_delta
from firnline.sinks.delta.sweeps import SweepLog
from firnline.sinks.delta.table import Table
from firnline.state import snapshot as layout
from firnline.state.home import StateHome
from firnline.state.manifest import SnapshotRef
from firnline.state.remote import Replica, find_snapshot
from firnline.storage import Storage
from firnline.types import Json

_FINISH = "A sweep that died is finished by: firnline gc SPEC --yes"


@dataclass(frozen=True, slots=True)
class TakenState:
    """The checkpoints of state in a savepoint, and the current location of each of their files."""

    refs: dict[str, Json] = field(default_factory=dict)  # by the id of the checkpoint of state
    states: list[SavedState] = field(default_factory=list)
    files: dict[str, tuple[StateHome, int]] = field(default_factory=dict)  # by name: its home, its size
    replayed: list[int] = field(default_factory=list)  # epochs since the snapshots

    @property
    def saved(self) -> list[SavedBytes]:
        """Return the files as a manifest without copies lists them."""
        return [SavedBytes(name, size, "") for name, (_, size) in self.files.items()]


def is_behind(pipeline: OpenPipeline) -> bool:
    """Return whether epochs came after the newest snapshots, so that a restore folds them again."""
    head = pipeline.deciding.load_committed()
    if head.checkpoint is None or head.entry is None:
        return False
    return bool(check_state(pipeline, head.checkpoint, head.entry, head.checkpoint.positions).replayed)


def take_state(pipeline: OpenPipeline, head: Head) -> TakenState:
    """Return the files that the state of an epoch consists of.

    Raises:
        CheckpointError: it is incomplete, or the epochs since its snapshots cannot be folded again.
    """
    assert head.checkpoint is not None
    assert head.entry is not None
    found = check_state(pipeline, head.checkpoint, head.entry, head.checkpoint.positions)
    if found.problems:
        raise CheckpointError(found.problems[0].message, hint=found.problems[0].hint)
    refs = {**refs_of(head.checkpoint), **{ref.checkpoint: ref for ref in found.used}}
    taken = TakenState({name: ref.to_json() for name, ref in refs.items()}, replayed=found.replayed)
    for ref in refs.values():
        complete, home = find_snapshot(pipeline.state_home, ref).require()
        texts = layout.load_with_texts(home.storage, ref.checkpoint, ref.digest)[1]
        taken.states.append(SavedState(ref.checkpoint, ref.digest))
        sizes = {path: file.size_bytes for path, file in complete.files().items()}
        sizes |= {key: len(text) for key, text in texts.items()}
        taken.files.update({name: (home, size) for name, size in sorted(sizes.items())})
    return taken


def pinned_refs(saved: Savepoint) -> dict[str, Json]:
    """Return the pin's facts about a savepoint's state, by the id of the checkpoint of state."""
    known = refs_of(saved.checkpoint)
    found = {}
    for one in saved.state:
        ref = known.get(one.checkpoint) or SnapshotRef(one.checkpoint, int(one.checkpoint[:20]), one.digest, 0, 0, 0)
        found[one.checkpoint] = ref.to_json()
    return found


def check_still_there(pipeline: OpenPipeline, taken: TakenState) -> None:
    """Check the state again: a sweep may have run, or announced deletions, before the pin. Raises the errors of
    `take_state`."""
    refs = [SnapshotRef.from_json(value) for value in taken.refs.values()]
    sweep = find_doomed_state(pipeline, refs)
    if sweep is not None:
        raise CheckpointError(f"state that the savepoint needs is being deleted by {sweep}", hint=_FINISH)
    for value in taken.refs.values():
        find_snapshot(pipeline.state_home, SnapshotRef.from_json(value)).require()


def copy_state(
    taken: TakenState, target: Storage, home: StateHome, progress: Progress | None, stopping: Callable[[], bool]
) -> list[SavedBytes]:
    """Copy every file into the savepoint `target`, whose state is in `home`, and verify the copies.

    Raises:
        CheckpointError: a file was damaged at its origin.
    """

    def copy(name: str) -> SavedBytes:
        source, _ = taken.files[name]
        fault_point("savepoint.copy.before")
        size, sha256 = copy_file(source.storage, name, target, saved_state_key(name))
        fault_point("savepoint.copy.after")
        return SavedBytes(name, size, sha256)

    done = each("copying state", list(taken.files), copy, lambda name: taken.files[name][1], progress, stopping)
    for state in taken.states:
        layout.verify_files(home.storage, layout.load(home.storage, state.checkpoint, state.digest), deep=True)
    return done


class SavedStateSource:
    """The state of a savepoint being restored: checked before any change, then copied into the home."""

    def __init__(
        self, pipeline: OpenPipeline, saved: Savepoint, storage: Storage, storage_options: dict[str, str]
    ) -> None:
        self._pipeline = pipeline
        self._saved = saved
        self._storage = storage
        self._home = pipeline.state_home
        self._source = self._find_source(storage_options)

    def _find_source(self, storage_options: dict[str, str]) -> StateHome:
        """Return the origin of the state: the copies, otherwise the pipeline's home, or the one that it was saved
        in."""
        if self._saved.copied:
            return StateHome(f"{self._storage.root}/{STATE}", storage_options)
        then = StateHome(self._saved.state_home, dict(self._pipeline.options.home.storage_options))
        return then if self._saved.state_home and not self._is_in(self._home) and self._is_in(then) else self._home

    def _is_in(self, home: StateHome) -> bool:
        try:
            for value in pinned_refs(self._saved).values():
                find_snapshot(home, SnapshotRef.from_json(value)).require()
        except CheckpointError:
            return False
        return True

    def check(self) -> StateCheck:
        """Check whether a run will find the state afterwards.

        Raises:
            DamagedError: a copy differs from what was saved.
        """
        if self._saved.copied:
            self._check_copies()
        ledger = Ledger(self._storage, self._pipeline.options.name)
        ledger.folder = LEDGER  # of the savepoint: the table may not have the chain yet
        checkpoint = self._saved.checkpoint
        pipeline = replace(self._pipeline, ledger=ledger)
        return check_state(pipeline, checkpoint, self._saved.entry, checkpoint.positions, self._source)

    def _check_copies(self) -> None:
        for file in self._saved.state_files:
            key = saved_state_key(file.name)
            what = f"{key} of the savepoint"
            try:
                if not is_inside(self._storage, key):
                    raise DamagedError(f"{what} is a link", what=what)
                if self._storage.stat(key).size_bytes != file.size_bytes:
                    raise DamagedError(f"{what} does not have the size that it was saved with", what=what)
                if sha256_of(self._storage, key) != file.sha256:
                    raise DamagedError(f"{what} is not what was saved", what=what)
            except FileNotFoundError as error:
                raise DamagedError(f"{what} is missing", what=what) from error

    def check_spared(self) -> None:
        """Refuse state that a sweep deletes or has deleted, at the current version of the deciding table.

        Raises:
            RollbackRefusedError: it names the sweep, or what is missing.
        """
        log = SweepLog(self._pipeline.storage, as_delta(self._pipeline.deciding).table, self._pipeline.options.name)
        names = self._names()
        if not names:
            return
        found = log.find_covering(names) if log.table.refresh() else None
        if found is not None:
            raise RollbackRefusedError(
                f"{len(found[1])} file(s) of the savepoint's state are being deleted by {found[0]}", hint=_FINISH
            )
        try:
            for value in pinned_refs(self._saved).values():
                find_snapshot(self._home, SnapshotRef.from_json(value)).require()
        except CheckpointError as error:
            raise RollbackRefusedError(
                f"state of the savepoint was deleted at this moment: {error.message}",
                hint="Run the same command again; what a savepoint has copies of is copied then.",
            ) from error

    def _names(self) -> set[str]:
        names = {file.name for file in self._saved.state_files}
        return names | {REMOTE + name for name in names}

    def _sweeps(self) -> SweepLog:
        table = Table(self._pipeline.storage.root, self._pipeline.options.home.storage_options)
        return SweepLog(self._pipeline.storage, table, self._pipeline.options.name)

    def bring_back(self) -> int:
        """Copy the state that the home lacks. Returns the bytes copied. Repeatable.

        Raises:
            CheckpointError: a file differs from what was saved.
            RollbackRefusedError: a sweep may still delete files of these names.
        """
        if self._source is self._home:
            return 0  # in the home, or in the remote tier, which a run also reads
        log = self._sweeps()
        signed = log.find_signed(self._names()) if log.table.refresh() else None
        if signed is not None:
            raise RollbackRefusedError(
                f"the savepoint's state has the names of files that {signed} set out to delete, and may still delete",
                hint=f"Make sure that this process is gone. {_FINISH}",
            )
        replica = Replica(self._home.storage, self._source.storage)
        return sum(replica.restore_missing(state.checkpoint, state.digest) for state in self._saved.state)
