"""Finds the operator state that a run resumes from: the named snapshot, or an older one and the epochs since."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from firnline.checkpoint.codec import canonical, checksum, parse, short_number
from firnline.checkpoint.ledger import JUMPS, LedgerEntry
from firnline.checkpoint.model import Checkpoint
from firnline.errors import CheckpointError, ConfigError, DamagedError, LedgerHoleError, StateLostError
from firnline.graph import downstream
from firnline.jobs.dataflow import Dataflow, shape_of
from firnline.jobs.watermarks import Watermarks
from firnline.options import OperatorOptions
from firnline.run.open_pipeline import OpenPipeline
from firnline.run.progress import Behind
from firnline.sinks.base import Head
from firnline.sources.columns import columns_from_json
from firnline.state import snapshot as layout
from firnline.state.home import StateHome
from firnline.state.load import EMPTY, export_digest
from firnline.state.manifest import CompleteCheckpoint, SnapshotRef
from firnline.state.refs import OperatorState
from firnline.state.remote import Replica
from firnline.stores.tiers import Place
from firnline.types import EntryRef, Json

logger = logging.getLogger(__name__)

_GOES_ON = frozenset(JUMPS) - {"fresh"}  # their state after is the state that they continue from


@dataclass(frozen=True, slots=True)
class PastEpoch:
    """One epoch of the history. `entry` is None if only a copy of its checkpoint is intact."""

    checkpoint: Checkpoint
    kind: str
    previous: EntryRef | None
    jump: dict[str, Json] = field(default_factory=dict)
    entry: LedgerEntry | None = None

    @property
    def epoch(self) -> int:
        """Its number."""
        return self.checkpoint.epoch

    @property
    def is_read(self) -> bool:
        """Whether it read input. Epochs of every other kind fold nothing."""
        return self.kind == "epoch"


class Past:
    """The history backwards from an epoch that a sink holds, read on demand."""

    def __init__(self, pipeline: OpenPipeline, held: Head) -> None:
        self._ledger = pipeline.ledger
        self._copies = _Copies(pipeline, held)
        self._next = held.entry
        self._entries = pipeline.ledger.entries(held.entry)
        self._ended = False
        self._problem = ""
        self.epochs: list[PastEpoch] = []  # newest first

    def get(self, number: int) -> PastEpoch | None:
        """Return the epoch `number` places before the newest; None where the history ends or cannot be read."""
        while len(self.epochs) <= number and not self._ended:
            found = self._read()
            if found is None:
                self._ended = True
            else:
                self.epochs.append(found)
                self._next = found.previous
        return self.epochs[number] if number < len(self.epochs) else None

    @property
    def reaches_beginning(self) -> bool:
        """Whether the history was read to the first epoch."""
        return self._ended and not self._problem and bool(self.epochs) and self.epochs[-1].previous is None

    @property
    def problem(self) -> str:
        """Why the history could not be read to its beginning, for messages."""
        return self._problem or "its older entries are folded"

    @property
    def began_afresh(self) -> bool:
        """Return whether there is no state after the newest epoch: a fresh start, another tool's progress, or a
        rollback to one."""
        number = 0
        while (found := self.get(number)) and found.kind in _GOES_ON and not found.checkpoint.state:
            number += 1
        return found is not None and found.kind in ("fresh", "baseline")

    def _read(self) -> PastEpoch | None:
        try:
            entry, _ = next(self._entries)
        except StopIteration:
            if self._next is None:
                return None
            try:  # the next link is a fold, or a ledger repair skips it
                next(self._ledger.chain(self._next))
            except LedgerHoleError as error:
                return self._read_copy(self._next, error)
            return None
        except LedgerHoleError as error:
            assert self._next is not None
            return self._read_copy(self._next, error)
        return PastEpoch(entry.checkpoint, entry.kind, entry.previous, entry.jump, entry)

    def _read_copy(self, ref: EntryRef, error: LedgerHoleError) -> PastEpoch | None:
        found = self._copies.find(ref)
        if found is None:
            self._problem = error.message
            return None
        logger.warning("a copy stands in for a ledger entry", extra={"epoch": found.epoch, "reason": error.message})
        self._entries = self._ledger.entries(found.previous)
        if found.previous is None and found.kind != "fresh":
            self._problem = error.message
        return found


class _Copies:
    """Copies of checkpoints outside the ledger, each proven by its own checksum."""

    def __init__(self, pipeline: OpenPipeline, held: Head) -> None:
        self._pipeline = pipeline
        self._held = held
        self._commits: Iterator[dict[str, Json]] | None = None
        self._known: dict[int, dict[str, Json]] = {}  # by epoch: what the commit says

    def find(self, ref: EntryRef) -> PastEpoch | None:
        """Return the epoch of this ledger entry; None if no copy is intact or its predecessor is unknown."""
        info = self._commit_of(ref.epoch) or {}
        checkpoint = self._checkpoint(ref, info)
        if checkpoint is None:
            return None
        entry = self._mend(ref, checkpoint)
        if entry is not None:
            return PastEpoch(checkpoint, entry.kind, entry.previous, entry.jump, entry)
        kind, jump = str(info.get("kind") or self._kind(ref)), dict(info.get("jump") or {})
        return PastEpoch(checkpoint, kind, self._previous(ref.epoch, kind, jump, info), jump)

    def _mend(self, ref: EntryRef, checkpoint: Checkpoint) -> LedgerEntry | None:
        """Return the entry with this checkpoint instead of its own; None unless the result has the entry's checksum."""
        ledger, what = self._pipeline.ledger, f"ledger entry {ref.name}"
        data = next((data for found, data in ledger.candidates(ref.epoch) if found.name == ref.name), b"")
        try:
            mended = canonical({**parse(data, what), "checkpoint": checkpoint.to_json()})
            return LedgerEntry.from_bytes(mended, what) if checksum(mended) == ref.checksum else None
        except (CheckpointError, OSError, TypeError):
            return None

    def _checkpoint(self, ref: EntryRef, info: dict[str, Json]) -> Checkpoint | None:
        if self._held.entry == ref and self._held.checkpoint is not None:
            return self._held.checkpoint
        with contextlib.suppress(DamagedError, KeyError):
            found = Checkpoint.from_json(info["checkpoint"], f"the commit of epoch {ref.epoch}")
            if (found.pipeline, found.epoch) == (self._pipeline.options.name, ref.epoch):
                return found
        record = self._recorded(ref)
        return record[0] if record else None

    def _kind(self, ref: EntryRef) -> str:
        record = self._recorded(ref)
        return record[1] if record else ""

    def _recorded(self, ref: EntryRef) -> tuple[Checkpoint, str] | None:
        """Return the record of exactly this entry from the store or a tier."""
        places: tuple[Place, ...] = self._pipeline.recorder.places
        for place in places:
            with contextlib.suppress(OSError, CheckpointError, ValueError):
                found = place.search(ref.epoch, short_number(ref.checksum))
                if found is not None:
                    return found.checkpoint, found.kind
        return None

    def _previous(self, epoch: int, kind: str, jump: dict[str, Json], info: dict[str, Json]) -> EntryRef | None:
        """Return the entry before this one. A commit of an older Firnline names only its epoch."""
        with contextlib.suppress(KeyError, TypeError, ValueError):
            return EntryRef.from_json(info["previous"])
        if kind in ("fresh", ""):
            return None
        before = self._commit_of(int(jump["to_epoch"]) if "to_epoch" in jump else epoch - 1) or {}
        with contextlib.suppress(KeyError, TypeError, ValueError):
            return EntryRef.from_json(before["entry"])
        return None

    def _commit_of(self, epoch: int) -> dict[str, Json] | None:
        """Return the commit of an epoch in the deciding table's log; epoch numbers are never reused."""
        if self._commits is None:
            self._commits = self._scan()
        while epoch not in self._known:
            info = next(self._commits, None)
            if info is None:
                return None
            self._known.setdefault(int(info["epoch"]), info)
        return self._known[epoch]

    def _scan(self) -> Iterator[dict[str, Json]]:
        for commit in self._pipeline.deciding.read_log():
            if isinstance(commit.info.get("epoch"), int) and "checkpoint" in commit.info:
                yield commit.info


@dataclass(slots=True)
class Restored:
    """What a run resumes from. `epochs` has the epoch of each operator's state."""

    state: dict[str, OperatorState] = field(default_factory=dict)
    epochs: dict[str, int] = field(default_factory=dict)
    shards: int | None = None
    behind: list[Behind] = field(default_factory=list)
    path: str = "fresh"  # local, sink (the table's own folder), remote, or fresh
    used: dict[str, SnapshotRef] = field(default_factory=dict)  # by operator: the snapshot that it resumes from
    passed_over: bool = False  # whether newer snapshots are damaged or missing
    initial: dict[str, str] = field(default_factory=dict)  # digests of exported states to load again


def restore_state(
    pipeline: OpenPipeline, flow: Dataflow, home: StateHome, held: Head, *, only_look: bool = False
) -> Restored:
    """Restore every operator from its newest intact snapshot that is no newer than those of the operators it feeds.

    With `only_look` nothing is written: state that only the remote tier has is read there.

    Raises:
        StateLostError: no intact snapshot exists from which the later epochs can be folded again.
        ConfigError: an operator was inserted before another whose newest snapshot lacks epochs from before that.
    """
    if held.checkpoint is None or not flow.stateful:
        return Restored()
    past, named = Past(pipeline, held), held.checkpoint.state
    if not named and past.began_afresh:
        return Restored()
    finder = _Finder(home, past, only_look=only_look)
    restored = Restored()
    for operator in reversed(flow.stateful):  # downstream operators first: they limit those that feed them
        fed = [name for name in fed_by(pipeline, flow, operator) if name in restored.epochs]
        limit = min((restored.epochs[name] for name in fed), default=held.epoch)
        known = [name for name in (operator.name, operator.renamed_from) if name in named]
        if not known:  # added, and allowed to start empty
            if limit < held.epoch:
                raise _added_before_old_state(operator.name, fed, restored.epochs, held.epoch)
            restored.epochs[operator.name] = held.epoch
            continue
        start = finder.find(operator, limit)
        restored.epochs[operator.name] = start.epoch
        if start.ref is None:
            if start.initial:
                restored.initial[operator.name] = start.initial
            continue
        assert start.complete is not None
        _check_same(pipeline, operator, start.complete, start.name)
        restored.used[operator.name] = start.ref
        if start.complete.plan.operators[start.name].key_schema:  # otherwise it never got a row
            restored.state[operator.name] = start.complete.operators[start.name]
            restored.shards = max(restored.shards or 0, start.ref.wanted or len(start.complete.plan.shards))
    restored.path = "sink" if finder.path == "local" and pipeline.options.checkpoint.local is None else finder.path
    restored.passed_over = finder.passed_over
    restored.behind = _epochs_since(pipeline, flow, past, held, restored.epochs)
    return restored


def _added_before_old_state(name: str, fed: list[str], epochs: Mapping[str, int], newest: int) -> ConfigError:
    late = next(other for other in fed if epochs[other] < newest)
    return ConfigError(
        f"operator {name!r} was put before {late!r}, whose newest snapshot is that of epoch {epochs[late]}: the epochs"
        f" up to {newest} were read without it, and cannot be folded again with it",
        hint=f"Run with the operators as they were, have a snapshot made (firnline checkpoint), then add {name}.",
        operator=name,
    )


def _epochs_since(
    pipeline: OpenPipeline, flow: Dataflow, past: Past, held: Head, epochs: Mapping[str, int]
) -> list[Behind]:
    """Return the epochs that some operator lacks, oldest first.

    Raises:
        StateLostError: the ledger no longer has one of them, or one of them imported state.
    """
    oldest = min(epochs.values(), default=held.epoch)
    needed: list[Behind] = []
    number = 0
    while oldest < held.epoch:
        found = past.get(number)
        if found is None:
            if past.reaches_beginning:
                break
            raise StateLostError(
                f"the ledger no longer tells what was read after epoch {oldest}: {past.problem}", epoch=oldest
            )
        if found.epoch <= oldest or found.kind == "fresh":
            break
        _check_import(pipeline, found, epochs)
        if found.is_read:
            needed.append(_behind(flow, past, number, epochs))
        number += 1
    return needed[::-1]


def _behind(flow: Dataflow, past: Past, number: int, epochs: Mapping[str, int]) -> Behind:
    """Return one epoch to fold again, with the base of its plan."""
    found, before = past.get(number), past.get(number + 1)
    assert found is not None
    if found.entry is None:
        raise StateLostError(
            f"the ledger entry of epoch {found.epoch} is damaged, and no snapshot of the state is as new:"
            " what that epoch read is told nowhere else",
            hint="Bring the entry back from a backup of the table's _firnline folder; or go back to an epoch with a "
            "snapshot of its own (firnline rollback --to EPOCH), or to a savepoint.",
            epoch=found.epoch,
        )
    if before is None and found.previous is not None:
        raise StateLostError(
            f"no copy is intact of the checkpoint that epoch {found.epoch} was planned on: {past.problem}",
            epoch=found.epoch,
        )
    checkpoint = before.checkpoint if before is not None else None
    skip = frozenset(name for name, epoch in epochs.items() if epoch >= found.epoch)
    columns = columns_from_json(checkpoint.columns if checkpoint is not None else {})
    return Behind(found.entry, known_watermarks(flow, checkpoint), columns, skip)


def _check_import(pipeline: OpenPipeline, found: PastEpoch, epochs: Mapping[str, int]) -> None:
    """Check that the snapshot in use includes the state that an epoch imported: no input can recreate it."""
    if found.kind != "import":
        return
    renamed = {o.renamed_from: o.name for o in pipeline.options.operators if o.renamed_from}
    name = str(found.jump.get("operator", ""))
    lacking = [
        one for one, epoch in epochs.items() if epoch < found.epoch and (one == renamed.get(name, name) or not name)
    ]
    if lacking:
        raise StateLostError(
            f"the state of {lacking[0]!r} that epoch {found.epoch} imported is lost, and no input makes it again",
            epoch=found.epoch,
            operator=lacking[0],
        )


@dataclass(frozen=True, slots=True)
class _Start:
    """The start of one operator's state: a snapshot, or empty state before the first epoch that it folded."""

    epoch: int
    name: str = ""  # its name in the snapshot
    ref: SnapshotRef | None = None
    complete: CompleteCheckpoint | None = None
    initial: str = ""  # the digest of the exported state that it started with


class _Finder:
    """Searches the tiers for snapshots. Each snapshot is loaded or rejected only once."""

    def __init__(self, home: StateHome, past: Past, *, only_look: bool) -> None:
        self._home = home
        self._past = past
        self._only_look = only_look
        self._loaded: dict[str, CompleteCheckpoint | CheckpointError] = {}
        self.path = "fresh"

    @property
    def passed_over(self) -> bool:
        """Whether a snapshot was damaged or missing."""
        return any(isinstance(found, CheckpointError) for found in self._loaded.values())

    def find(self, operator: OperatorOptions, limit: int) -> _Start:
        """Return an operator's newest intact snapshot up to `limit`; without one, its first epoch.

        Raises:
            StateLostError: there is no snapshot, and its first epoch cannot be proven or is newer than `limit`.
        """
        number, reasons = 0, []
        seen: set[str] = set()
        refs: list[SnapshotRef] = []  # of every epoch that names it, newest first
        while (found := self._past.get(number)) is not None:
            name = next((n for n in (operator.name, operator.renamed_from) if n in found.checkpoint.state), "")
            if not name:
                break
            number += 1
            refs.append(SnapshotRef.from_json(found.checkpoint.state[name]))
            if refs[-1].checkpoint in seen or refs[-1].epoch > limit:
                continue
            seen.add(refs[-1].checkpoint)
            complete = self._load(refs[-1])
            if isinstance(complete, CompleteCheckpoint):
                return _Start(refs[-1].epoch, name, refs[-1], complete)
            reasons.append(complete.message)
        why = reasons[0] if reasons else "no snapshot is old enough" if refs else "no checkpoint names it"
        return self._from_birth(operator, limit, refs, why)

    def _from_birth(self, operator: OperatorOptions, limit: int, refs: list[SnapshotRef], why: str) -> _Start:
        """Start before the first epoch that the operator folded, according to its newest reference or the ledger."""
        lost = f"the state of operator {operator.name!r} is lost: {why}"
        born = refs[0].born if refs else None
        if born is None:
            born = self._prove_birth(refs, number=len(refs) - 1)
            if born is None or operator.initial_state not in ("", EMPTY):
                raise StateLostError(
                    f"{lost}; and neither its checkpoints nor the ledger tell in which epoch, and with what state, the"
                    " operator began, so it cannot be made again from its input",
                    operator=operator.name,
                )
        if born - 1 > limit:
            raise StateLostError(
                f"{lost}; it began with epoch {born}, and an operator that it feeds needs epochs from {limit + 1} on",
                operator=operator.name,
                epoch=born,
            )
        initial = refs[0].initial
        if initial and export_digest(operator.initial_state) != initial:
            raise StateLostError(
                f"{lost}; it began with an exported state, and initial_state no longer names that file",
                hint="Bring the exported file back and name it as initial_state of the operator.",
                operator=operator.name,
            )
        extra = {"operator": operator.name, "epoch": born, "reason": why}
        logger.warning("state is made again from the first epoch of the operator", extra=extra)
        return _Start(born - 1, initial=initial)

    def _prove_birth(self, refs: list[SnapshotRef], number: int) -> int | None:
        """Return the epoch in which an operator started, for checkpoints without that field; None if it is uncertain.

        The first epoch of an operator makes a snapshot. If the epoch before names an operator that this one does not,
        it may be the same operator under another name, which then started earlier.
        """
        first, before = self._past.get(number) if number >= 0 else None, self._past.get(number + 1)
        if first is None or not first.is_read or refs[-1].epoch != first.epoch:
            return None
        if before is None:
            return first.epoch if self._past.reaches_beginning else None
        return first.epoch if set(before.checkpoint.state) <= set(first.checkpoint.state) else None

    def _load(self, ref: SnapshotRef) -> CompleteCheckpoint | CheckpointError:
        if ref.checkpoint not in self._loaded:
            self._loaded[ref.checkpoint] = self._try(ref)
        return self._loaded[ref.checkpoint]

    def _try(self, ref: SnapshotRef) -> CompleteCheckpoint | CheckpointError:
        home = self._home
        try:
            try:
                found = layout.load(home.storage, ref.checkpoint, ref.digest)
                layout.verify_files(home.storage, found, deep=False)
                self.path = "local"
            except CheckpointError:
                if home.fallback is None:
                    raise
                if self._only_look:
                    found = layout.load(home.fallback.storage, ref.checkpoint, ref.digest)
                    layout.verify_files(home.fallback.storage, found, deep=False)
                else:
                    Replica(home.storage, home.fallback.storage).restore_missing(ref.checkpoint, ref.digest)
                    found = layout.load(home.storage, ref.checkpoint, ref.digest)
                self.path = "remote"
        except CheckpointError as error:
            logger.warning("snapshot passed over", extra={"checkpoint": ref.checkpoint, "reason": error.message})
            return error
        return found


def known_watermarks(flow: Dataflow, checkpoint: Checkpoint | None) -> Watermarks:
    """Return the watermarks of a checkpoint under the current names of operators and inputs."""
    stored = Watermarks.from_json(checkpoint.watermarks) if checkpoint is not None else Watermarks()
    old = {operator.name: operator.renamed_from or operator.name for operator in flow.stateful}
    inputs = {o.name: {port: old.get(port, port) for port in o.inputs} for o in flow.stateful}
    return stored.renamed(old, inputs)


def fed_by(pipeline: OpenPipeline, flow: Dataflow, operator: OperatorOptions) -> list[str]:
    """Return the stateful operators that an operator's rows reach."""
    reached = {node.name for node in downstream(pipeline.options, operator.name) if node.kind == "operator"}
    return [other.name for other in flow.stateful if other.name in reached]


def _check_same(pipeline: OpenPipeline, operator: OperatorOptions, complete: CompleteCheckpoint, known: str) -> None:
    """Raise ConfigError if the spec would give the stored state another meaning."""
    groups, found = complete.plan.key_groups, complete.plan.operators[known]
    if groups != pipeline.options.state.key_groups:
        raise ConfigError(
            f"the state was made with {groups} key groups, the spec says {pipeline.options.state.key_groups}",
            hint=f"Set state.key_groups: {groups}; they are fixed for the life of a pipeline, shards are not.",
        )
    if found.type != operator.type or found.shape not in ("", shape_of(operator)):
        what = f"type {found.type}" if found.type != operator.type else "other keys, inputs or windows"
        raise ConfigError(
            f"the state of operator {operator.name!r} was made with {what}",
            hint=f"Set it as it was; or give it a new name, initial_state: empty, and state.dropped: [{known}]",
        )


def check_operators(pipeline: OpenPipeline, flow: Dataflow, held: Head) -> None:
    """Check that the spec has every operator with state in the checkpoint, or drops it by name.

    Raises:
        ConfigError: operators were added, removed or renamed, and the spec does not say what happens to their state.
    """
    if held.checkpoint is None:
        return
    named = held.checkpoint.state
    if not named and Past(pipeline, held).began_afresh:
        return
    spec = {operator.name for operator in flow.stateful}
    renamed = {operator.renamed_from for operator in flow.stateful if operator.renamed_from}
    for name in named:
        if name not in spec | renamed | set(pipeline.options.state.dropped):
            raise ConfigError(
                f"the checkpoint holds the state of an operator {name!r}, which the spec no longer has",
                hint=f"If it has another name now: renamed_from: {name}. To give its state up: state.dropped: [{name}]",
            )
    for operator in flow.stateful:
        known = operator.name in named or (operator.renamed_from and operator.renamed_from in named)
        if not known and not operator.initial_state:
            raise ConfigError(
                f"operator {operator.name!r} was added to a pipeline that has history: there is no state of it",
                hint="initial_state: empty lets it begin with what comes next; or name the file of an exported state.",
            )
