"""Deletes operators' state that nothing can need any more, in every home that a pipeline's state has.

What must stay is collected before anything is listed:
- what every sink names: the deciding one with and without pending units; of one that lags, its epoch's ledger entry;
- the state of every ledger entry from the floor on, and of every version from there on in the store and the tiers;
- savepoints, and restores that are under way, by their pins.
Everything from the oldest snapshot of these on stays too, which is more than any run has in flight. A ledger or a pin
that cannot be read might name anything: then nothing is deleted.
"""

from __future__ import annotations

import logging
import uuid
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Protocol

from firnline.checkpoint.ledger import Ledger
from firnline.checkpoint.tiers import Place
from firnline.errors import CheckpointError, SinkError
from firnline.graph import stateful
from firnline.options import PipelineOptions
from firnline.sinks.delta import DeltaSink
from firnline.staging.references import is_live, read_pins
from firnline.state.home import StateHome
from firnline.state.layout import COMMITTED, exists
from firnline.state.replica import Replica
from firnline.state.sweeping import Marks, Swept, sweep
from firnline.storage import Storage
from firnline.types import Json

logger = logging.getLogger(__name__)

GRACE_SECONDS = 86_400.0
RUN_GRACE_SECONDS = 900.0  # for a run's own sweeps: it knows what it has in flight, others may be a little behind


class Copies(Protocol):
    """Where copies of checkpoints are kept."""

    @property
    def places(self) -> Sequence[Place]: ...


class Pipeline(Protocol):
    """What a sweep needs of a pipeline's parts. No other thread may use the sinks meanwhile."""

    @property
    def options(self) -> PipelineOptions: ...

    @property
    def sinks(self) -> tuple[DeltaSink, ...]: ...

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

    The remote tier is swept through `replica`, which the run that copies there holds; without one, only while no run
    may be at work.

    Args:
        parts: The pipeline's parts, for this call alone: a run assembles others than those that it works with.
        grace_seconds: Files younger than this, by the home's own clock, stay.
        dry_run: Delete nothing, and say what would be deleted.

    Raises:
        CheckpointError: the ledger, a pin or a checkpoint that must stay cannot be read; nothing more was deleted.
        SinkError: a sink or a home cannot be read or written; what was deleted was needed by nobody.
    """
    home = parts.state_home
    try:
        needed = find_needed(parts)
        found = [_sweep_home(parts, home, needed, grace_seconds, dry_run=dry_run)]
        if home.fallback is not None:
            marks = needed.marks
            found.append(_sweep_remote(parts, home.fallback, marks, grace_seconds, dry_run=dry_run, replica=replica))
    except OSError as error:
        raise SinkError(f"the state of {parts.options.name!r} cannot be swept: {error}") from error
    for one in found:
        facts = {"home": one.home, "checkpoints": one.checkpoints, "files": one.files, "size_bytes": one.size_bytes}
        logger.info("state swept", extra=facts)
    return found


# -- what must stay -----------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Needed:
    """What must stay; `tip` is what the newest epochs name, which no run can do without."""

    marks: Marks
    tip: frozenset[str] = frozenset()
    notes: tuple[str, ...] = ()  # what was passed over on the way


def find_needed(parts: Pipeline) -> Needed:
    """Find out what must stay.

    Raises:
        CheckpointError: the ledger has a hole, or a pin cannot be read.
    """
    notes: list[str] = []
    pinned = list(_pinned(parts))  # before the sinks: what a restore has pinned, its commit names before the pin goes
    epochs = list(_lagging(parts, notes))
    newest, committed = parts.sinks[0].load(), parts.sinks[0].load_committed()
    if committed.exists:
        parts.sinks[0].make_durable()  # its floor decides what goes
    if committed.checkpoint is None or newest.checkpoint is None:
        return Needed(Marks({}, 0))  # there may be an epoch in flight, and nothing that tells it from another one
    floor = committed.checkpoint.floor
    live: list[Mapping[str, Json]] = [newest.checkpoint.state, committed.checkpoint.state]
    for entry, _ in parts.ledger.entries(newest.entry):
        if entry.epoch < min([floor, *epochs]):
            break
        live.append(entry.checkpoint.state)
    live += _copied(parts, floor, notes)
    names = [operator.name for operator in stateful(parts.options)]
    tip = Marks.collect(floor, names, live[:2]).ids
    return Needed(Marks.collect(floor, names, live, pinned), frozenset(tip), tuple(notes))


def _pinned(parts: Pipeline) -> Iterator[Mapping[str, Json]]:
    for pin in read_pins(parts.storage):
        if pin.get("pipeline") == parts.options.name and pin.get("state"):
            yield pin["state"]


def _lagging(parts: Pipeline, notes: list[str]) -> Iterator[int]:
    """The epochs of the further sinks. The floor is no newer than any of them, also of one that cannot be read."""
    for sink in parts.sinks[1:]:
        try:
            yield sink.load().epoch
        except SinkError as error:
            notes.append(f"sink {sink.name} was passed over: {error.message}")


def _copied(parts: Pipeline, floor: int, notes: list[str]) -> Iterator[Mapping[str, Json]]:
    """What store and tiers have from the floor on. They are copies of ledger entries, so one may be missing."""
    for place in parts.recorder.places:
        try:
            yield from (record.checkpoint.state for record in place.load_since(floor))
        except (OSError, CheckpointError) as error:
            notes.append(f"the {place.path} copy {place.place} was passed over: {error}")


# -- the homes ----------------------------------------------------------------------------------------


def _sweep_home(parts: Pipeline, home: StateHome, needed: Needed, grace_seconds: float, *, dry_run: bool) -> StateSwept:
    storage, notes = home.storage, list(needed.notes)
    if _is_empty(storage):
        return StateSwept(storage.root, "home", dry_run, notes=needed.notes)
    absent = {checkpoint for checkpoint in needed.marks.ids if not _has(home, checkpoint)}
    remote = {checkpoint for checkpoint in absent if home.fallback is not None and _has(home.fallback, checkpoint)}
    lost = absent - remote - needed.tip  # nobody can use them, whatever else is kept; without the tip's nothing goes
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
    )
    return _report(storage, "home", swept, dry_run=dry_run, notes=notes)


def _sweep_remote(
    parts: Pipeline,
    remote: StateHome,
    marks: Marks,
    grace_seconds: float,
    *,
    dry_run: bool,
    replica: Replica | None,
) -> StateSwept:
    storage, kept = remote.storage, parts.options.checkpoint
    if _is_empty(storage):
        return StateSwept(storage.root, "remote", dry_run)
    limits = (grace_seconds, kept.keep_checkpoints, kept.keep_aborted_secs)
    if replica is not None and not dry_run:
        swept = replica.sweep_remote(marks, _now(storage), *limits)
        return _report(storage, "remote", swept, dry_run=dry_run, notes=[])
    # One process copies to it and sweeps it: else a file could be seen by the one and deleted by the other.
    if not dry_run and is_live(parts.storage, parts.options.name, parts.sinks[0].load_committed().generation):
        note = "left alone: a run may be copying there, and sweeps it itself"
        return StateSwept(storage.root, "remote", dry_run, notes=(note,))
    swept = sweep(storage, marks, _now(storage), *limits, dry_run, absent_marks=True)
    return _report(storage, "remote", swept, dry_run=dry_run, notes=[])


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
    return exists(home.storage, f"{checkpoint}/{COMMITTED}")


def _is_empty(storage: Storage) -> bool:
    return next(iter(storage.list("")), None) is None


def _now(storage: Storage) -> datetime:
    """The time by the clock that stamps the home's files, which may be another than this machine's."""
    key = f".{uuid.uuid4().hex}.tmp"
    storage.put(key, b"")
    try:
        return storage.stat(key).modified_at
    finally:
        storage.delete(key)
