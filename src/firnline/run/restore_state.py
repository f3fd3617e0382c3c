"""Finds the operator state that a run resumes from: the named snapshot, or an older one and the epochs since."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from firnline.checkpoint.codec import canonical, checksum, parse, short_number
from firnline.checkpoint.ledger import HISTORY_EDITS, LedgerEntry
from firnline.checkpoint.model import Checkpoint
from firnline.errors import CheckpointError, ConfigError, DamagedError, LedgerHoleError, StateLostError
from firnline.graph import downstream
from firnline.jobs.dataflow import Dataflow, shape_of
from firnline.jobs.watermarks import Watermarks
from firnline.options import OperatorOptions
from firnline.run.open_pipeline import OpenPipeline
from firnline.run.progress import MissingEpoch
from firnline.sinks.base import Head
from firnline.sources.columns import columns_from_json
from firnline.state.home import StateHome
from firnline.state.load import EMPTY, export_digest
from firnline.state.manifest import CompleteCheckpoint, OperatorState, SnapshotRef, stored_name, stored_ref
from firnline.state.remote import find_snapshot
from firnline.stores.tiers import CopyStore
from firnline.types import EntryRef, Json

logger = logging.getLogger(__name__)

_KEEP_STATE = frozenset(HISTORY_EDITS) - {"fresh"}  # these edits continue with the state before them


@dataclass(frozen=True, slots=True)
class PastEpoch:
    """One epoch of the history. `entry` is None if only a copy of its checkpoint is intact."""

    checkpoint: Checkpoint
    kind: str
    previous: EntryRef | None
    edit: dict[str, Json] = field(default_factory=dict)
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

    def __init__(self, pipeline: OpenPipeline, head: Head) -> None:
        self._ledger = pipeline.ledger
        self._copies = _Copies(pipeline, head)
        self._next = head.entry
        self._entries = pipeline.ledger.entries(head.entry)
        self._ended = False
        self._problem = ""
        self.epochs: list[PastEpoch] = []  # newest first

    def get(self, number: int) -> PastEpoch | None:
        """Return the epoch `number` places before the newest; None where the history ends or cannot be read."""
        while len(self.epochs) <= number and not self._ended:
            past_epoch = self._read()
            if past_epoch is None:
                self._ended = True
            else:
                self.epochs.append(past_epoch)
                self._next = past_epoch.previous
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
        while (newest := self.get(number)) and newest.kind in _KEEP_STATE and not newest.checkpoint.state:
            number += 1
        return newest is not None and newest.kind in ("fresh", "baseline")

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
        return PastEpoch(entry.checkpoint, entry.kind, entry.previous, entry.edit, entry)

    def _read_copy(self, ref: EntryRef, error: LedgerHoleError) -> PastEpoch | None:
        copy = self._copies.find(ref)
        if copy is None:
            self._problem = error.message
            return None
        logger.warning("a copy stands in for a ledger entry", extra={"epoch": copy.epoch, "reason": error.message})
        self._entries = self._ledger.entries(copy.previous)
        if copy.previous is None and copy.kind != "fresh":
            self._problem = error.message
        return copy


class _Copies:
    """Copies of checkpoints outside the ledger, each proven by its own checksum."""

    def __init__(self, pipeline: OpenPipeline, head: Head) -> None:
        self._pipeline = pipeline
        self._head = head
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
            return PastEpoch(checkpoint, entry.kind, entry.previous, entry.edit, entry)
        kind, edit = str(info.get("kind") or self._kind(ref)), dict(info.get("jump") or {})
        return PastEpoch(checkpoint, kind, self._previous(ref.epoch, kind, edit, info), edit)

    def _mend(self, ref: EntryRef, checkpoint: Checkpoint) -> LedgerEntry | None:
        """Return the entry with this checkpoint instead of its own; None unless the result has the entry's checksum."""
        ledger, what = self._pipeline.ledger, f"ledger entry {ref.name}"
        data = next((data for known, data in ledger.candidates(ref.epoch) if known.name == ref.name), b"")
        try:
            mended = canonical({**parse(data, what), "checkpoint": checkpoint.to_json()})
            return LedgerEntry.from_bytes(mended, what) if checksum(mended) == ref.checksum else None
        except (CheckpointError, OSError, TypeError):
            return None

    def _checkpoint(self, ref: EntryRef, info: dict[str, Json]) -> Checkpoint | None:
        if self._head.entry == ref and self._head.checkpoint is not None:
            return self._head.checkpoint
        with contextlib.suppress(DamagedError, KeyError):
            checkpoint = Checkpoint.from_json(info["checkpoint"], f"the commit of epoch {ref.epoch}")
            if (checkpoint.pipeline, checkpoint.epoch) == (self._pipeline.options.name, ref.epoch):
                return checkpoint
        record = self._recorded(ref)
        return record[0] if record else None

    def _kind(self, ref: EntryRef) -> str:
        record = self._recorded(ref)
        return record[1] if record else ""

    def _recorded(self, ref: EntryRef) -> tuple[Checkpoint, str] | None:
        """Return the record of exactly this entry from the store or a tier."""
        stores: tuple[CopyStore, ...] = self._pipeline.recorder.stores
        for store in stores:
            with contextlib.suppress(OSError, CheckpointError, ValueError):
                record = store.search(ref.epoch, short_number(ref.checksum))
                if record is not None:
                    return record.checkpoint, record.kind
        return None

    def _previous(self, epoch: int, kind: str, edit: dict[str, Json], info: dict[str, Json]) -> EntryRef | None:
        """Return the entry before this one. A commit of an older Firnline names only its epoch."""
        with contextlib.suppress(KeyError, TypeError, ValueError):
            return EntryRef.from_json(info["previous"])
        if kind in ("fresh", ""):
            return None
        before = self._commit_of(int(edit["to_epoch"]) if "to_epoch" in edit else epoch - 1) or {}
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
    missing_epochs: list[MissingEpoch] = field(default_factory=list)
    path: str = "fresh"  # local, sink (the table's own folder), remote, or fresh
    used: dict[str, SnapshotRef] = field(default_factory=dict)  # by operator: the snapshot that it resumes from
    passed_over: bool = False  # whether newer snapshots are damaged or missing
    initial: dict[str, str] = field(default_factory=dict)  # digests of exported states to load again


def restore_state(
    pipeline: OpenPipeline, flow: Dataflow, home: StateHome, head: Head, *, read_only: bool = False
) -> Restored:
    """Restore every operator from its newest intact snapshot that is no newer than those of the operators it feeds.

    With `read_only` nothing is written: state that only the remote tier has is read there.

    Raises:
        StateLostError: no intact snapshot exists from which the later epochs can be folded again.
        ConfigError: an operator was inserted before another whose newest snapshot lacks epochs from before that.
    """
    if head.checkpoint is None or not flow.stateful:
        return Restored()
    past, named = Past(pipeline, head), head.checkpoint.state
    if not named and past.began_afresh:
        return Restored()
    finder = _SnapshotFinder(home, past, read_only=read_only)
    restored = Restored()
    for operator in reversed(flow.stateful):  # downstream operators first: they limit those that feed them
        fed = [name for name in fed_by(pipeline, flow, operator) if name in restored.epochs]
        limit = min((restored.epochs[name] for name in fed), default=head.epoch)
        if not stored_name(operator, named):  # added, and allowed to start empty
            if limit < head.epoch:
                raise _added_before_old_state(operator.name, fed, restored.epochs, head.epoch)
            restored.epochs[operator.name] = head.epoch
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
    restored.missing_epochs = _epochs_since(pipeline, flow, past, head, restored.epochs)
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
    pipeline: OpenPipeline, flow: Dataflow, past: Past, head: Head, epochs: Mapping[str, int]
) -> list[MissingEpoch]:
    """Return the epochs that some operator lacks, oldest first.

    Raises:
        StateLostError: the ledger no longer has one of them, or one of them imported state.
    """
    oldest = min(epochs.values(), default=head.epoch)
    needed: list[MissingEpoch] = []
    number = 0
    while oldest < head.epoch:
        past_epoch = past.get(number)
        if past_epoch is None:
            if past.reaches_beginning:
                break
            raise StateLostError(
                f"the ledger no longer tells what was read after epoch {oldest}: {past.problem}", epoch=oldest
            )
        if past_epoch.epoch <= oldest or past_epoch.kind == "fresh":
            break
        _check_import(pipeline, past_epoch, epochs)
        if past_epoch.is_read:
            needed.append(_missing_epoch(flow, past, number, epochs))
        number += 1
    return needed[::-1]


def _missing_epoch(flow: Dataflow, past: Past, number: int, epochs: Mapping[str, int]) -> MissingEpoch:
    """Return one epoch to fold again, with the base of its plan."""
    past_epoch, before = past.get(number), past.get(number + 1)
    assert past_epoch is not None
    if past_epoch.entry is None:
        raise StateLostError(
            f"the ledger entry of epoch {past_epoch.epoch} is damaged, and no snapshot of the state is as new:"
            " what that epoch read is told nowhere else",
            hint="Bring the entry back from a backup of the table's _firnline folder; or go back to an epoch with a "
            "snapshot of its own (firnline rollback --to EPOCH), or to a savepoint.",
            epoch=past_epoch.epoch,
        )
    if before is None and past_epoch.previous is not None:
        raise StateLostError(
            f"no copy is intact of the checkpoint that epoch {past_epoch.epoch} was planned on: {past.problem}",
            epoch=past_epoch.epoch,
        )
    checkpoint = before.checkpoint if before is not None else None
    skip = frozenset(name for name, epoch in epochs.items() if epoch >= past_epoch.epoch)
    columns = columns_from_json(checkpoint.columns if checkpoint is not None else {})
    after = columns_from_json(past_epoch.entry.checkpoint.columns)
    return MissingEpoch(past_epoch.entry, known_watermarks(flow, checkpoint), columns, after, skip)


def _check_import(pipeline: OpenPipeline, past_epoch: PastEpoch, epochs: Mapping[str, int]) -> None:
    """Check that the snapshot in use includes the state that an epoch imported: no input can recreate it."""
    if past_epoch.kind != "import":
        return
    renamed = {o.renamed_from: o.name for o in pipeline.options.operators if o.renamed_from}
    name = str(past_epoch.edit.get("operator", ""))
    lacking = [
        one
        for one, epoch in epochs.items()
        if epoch < past_epoch.epoch and (one == renamed.get(name, name) or not name)
    ]
    if lacking:
        raise StateLostError(
            f"the state of {lacking[0]!r} that epoch {past_epoch.epoch} imported is lost, and no input makes it again",
            epoch=past_epoch.epoch,
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


class _SnapshotFinder:
    """Finds the newest usable snapshot of each operator, epoch by epoch. Each snapshot is searched for only once."""

    def __init__(self, home: StateHome, past: Past, *, read_only: bool) -> None:
        self._home = home
        self._past = past
        self._read_only = read_only
        self._loaded: dict[str, CompleteCheckpoint | CheckpointError] = {}
        self.path = "fresh"

    @property
    def passed_over(self) -> bool:
        """Whether a snapshot was damaged or missing."""
        return any(isinstance(loaded, CheckpointError) for loaded in self._loaded.values())

    def find(self, operator: OperatorOptions, limit: int) -> _Start:
        """Return an operator's newest intact snapshot up to `limit`; without one, its first epoch.

        Raises:
            StateLostError: there is no snapshot, and its first epoch cannot be proven or is newer than `limit`.
        """
        number, reasons = 0, []
        seen: set[str] = set()
        refs: list[SnapshotRef] = []  # of every epoch that names it, newest first
        while (past_epoch := self._past.get(number)) is not None:
            ref = stored_ref(operator, past_epoch.checkpoint.state)
            if ref is None:
                break
            number += 1
            refs.append(ref)
            if ref.checkpoint in seen or ref.epoch > limit:
                continue
            seen.add(ref.checkpoint)
            complete = self._load(ref)
            if isinstance(complete, CompleteCheckpoint):
                return _Start(ref.epoch, stored_name(operator, past_epoch.checkpoint.state), ref, complete)
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
            search = find_snapshot(self._home, ref, bring_home=not self._read_only)
            if search.complete is None:
                problem = search.problems[-1]
                logger.warning("snapshot passed over", extra={"checkpoint": ref.checkpoint, "reason": problem.message})
            else:
                self.path = search.tier
            self._loaded[ref.checkpoint] = search.complete or search.problems[-1]
        return self._loaded[ref.checkpoint]


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
    groups, made = complete.plan.key_groups, complete.plan.operators[known]
    if groups != pipeline.options.state.key_groups:
        raise ConfigError(
            f"the state was made with {groups} key groups, the spec says {pipeline.options.state.key_groups}",
            hint=f"Set state.key_groups: {groups}; they are fixed for the life of a pipeline, shards are not.",
        )
    if made.type != operator.type or made.shape not in ("", shape_of(operator)):
        what = f"type {made.type}" if made.type != operator.type else "other keys, inputs or windows"
        raise ConfigError(
            f"the state of operator {operator.name!r} was made with {what}",
            hint=f"Set it as it was; or give it a new name, initial_state: empty, and state.dropped: [{known}]",
        )


def check_operators(pipeline: OpenPipeline, flow: Dataflow, head: Head) -> None:
    """Check that the spec has every operator with state in the checkpoint, or drops it by name.

    Raises:
        ConfigError: operators were added, removed or renamed, and the spec does not say what happens to their state.
    """
    if head.checkpoint is None:
        return
    named = head.checkpoint.state
    if not named and Past(pipeline, head).began_afresh:
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
        if not stored_name(operator, named) and not operator.initial_state:
            raise ConfigError(
                f"operator {operator.name!r} was added to a pipeline that has history: there is no state of it",
                hint="initial_state: empty lets it begin with what comes next; or name the file of an exported state.",
            )
