"""Finds the state that a run goes on from: what the sink's checkpoint names, or an older one and the epochs since."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass, field

from firnline.checkpoint.ledger import LedgerEntry
from firnline.checkpoint.model import Checkpoint
from firnline.engine.dataflow import Dataflow, shape_of
from firnline.engine.flight import Behind
from firnline.engine.orders import columns_from_json
from firnline.engine.parts import Parts
from firnline.engine.watermarks import Watermarks
from firnline.errors import CheckpointError, ConfigError, LedgerHoleError, StateLostError
from firnline.graph import downstream
from firnline.options import OperatorOptions
from firnline.sinks.base import Held
from firnline.state import layout
from firnline.state.home import StateHome
from firnline.state.manifest import CompleteCheckpoint, SnapshotRef
from firnline.state.refs import OperatorState
from firnline.state.replica import Replica

logger = logging.getLogger(__name__)


@dataclass(slots=True)
class Restored:
    """What a run goes on from. `epochs` says after which epoch each operator's state stands."""

    state: dict[str, OperatorState] = field(default_factory=dict)
    epochs: dict[str, int] = field(default_factory=dict)
    shards: int | None = None
    behind: list[Behind] = field(default_factory=list)
    path: str = "fresh"  # local, sink (the table's own folder), remote, or fresh


def restore_state(parts: Parts, flow: Dataflow, home: StateHome, held: Held, *, only_look: bool = False) -> Restored:
    """Restore every operator: its newest snapshot that is intact and no newer than those it feeds.

    With `only_look` nothing is written: what only the remote tier has is read there.

    Raises:
        StateLostError: there is no intact snapshot from which the epochs since can be folded again.
    """
    if held.checkpoint is None or not flow.stateful:
        return Restored()
    walk, named = _Walk(parts, flow, held), held.checkpoint.state
    if not named and walk.began_afresh:
        return Restored()
    finder = _Finder(home, walk, only_look=only_look)
    found = Restored()
    limits: dict[str, int] = {}
    for operator in reversed(flow.stateful):  # those downstream first: they limit those that feed them
        limit = min((limits[o] for o in fed_by(parts, flow, operator) if o in limits), default=held.epoch)
        name = operator.renamed_from or operator.name
        known = operator.name if operator.name in named else name
        if known not in named:  # added, with leave to begin empty
            limits[operator.name] = held.epoch
            found.epochs[operator.name] = held.epoch
            continue
        ref, complete = finder.find(known, limit)
        limits[operator.name] = ref.epoch if ref else 0
        found.epochs[operator.name] = ref.epoch if ref else 0
        if complete is not None:
            _check_same(parts, operator, complete, known)
        if complete is not None and complete.plan.operators[known].key_schema:  # else no row of it ever came
            found.state[operator.name] = complete.operators[known]
            found.shards = max(found.shards or 0, len(complete.plan.shards))
    found.path = "sink" if finder.path == "local" and parts.options.checkpoint.local is None else finder.path
    found.behind = walk.behind(found.epochs)
    return found


class _Walk:
    """The history from the tip backwards, read as far as it is needed."""

    def __init__(self, parts: Parts, flow: Dataflow, held: Held) -> None:
        self._parts = parts
        self._flow = flow
        self._held = held
        self._iterator = parts.ledger.entries(held.entry)
        self.entries: list[LedgerEntry] = []  # newest first
        self._ended = False

    @property
    def began_afresh(self) -> bool:
        """Whether there is no state after the newest epoch: a fresh start, another tool's progress, or back to one."""
        number = 0
        while (entry := self.get(number)) and entry.is_jump and entry.kind != "fresh" and not entry.checkpoint.state:
            number += 1
        return entry is not None and entry.kind in ("fresh", "baseline")

    def get(self, number: int) -> LedgerEntry | None:
        """The entry so many epochs before the tip; None where the history ends or has a hole."""
        while len(self.entries) <= number and not self._ended:
            try:
                self.entries.append(next(self._iterator)[0])
            except (StopIteration, LedgerHoleError):
                self._ended = True
        return self.entries[number] if number < len(self.entries) else None

    def behind(self, epochs: Mapping[str, int]) -> list[Behind]:
        """The epochs that some operator lacks, oldest first.

        Raises:
            StateLostError: the ledger no longer tells one of them, or state was imported in one of them.
        """
        oldest = min(epochs.values(), default=self._held.epoch)
        needed: list[Behind] = []
        number = 0
        while True:
            entry = self.get(number)
            if entry is None:
                if oldest == 0 and self.is_beginning(number):
                    break
                raise StateLostError(f"the ledger no longer tells what was read after epoch {oldest}", epoch=oldest)
            if entry.epoch <= oldest:
                break
            if entry.kind == "fresh":
                break
            self._check_import(entry, epochs)
            before = self.get(number + 1)
            if not entry.is_jump and entry.kind == "epoch":
                then = before.checkpoint if before is not None else None
                columns = columns_from_json(then.columns if then is not None else {})
                skip = frozenset(name for name, epoch in epochs.items() if epoch >= entry.epoch)
                needed.append(Behind(entry, known_watermarks(self._flow, then), columns, skip))
            number += 1
        return needed[::-1]

    def _check_import(self, entry: LedgerEntry, epochs: Mapping[str, int]) -> None:
        """What an epoch imported must be in the snapshot that is gone on from: no input makes it again."""
        if entry.kind != "import":
            return
        renamed = {o.renamed_from: o.name for o in self._parts.options.operators if o.renamed_from}
        name = str(entry.jump["operator"])
        if epochs.get(renamed.get(name, name), entry.epoch) < entry.epoch:
            raise StateLostError(
                f"the state of {name!r} that epoch {entry.epoch} imported is lost, and no input makes it again",
                epoch=entry.epoch,
                operator=name,
            )

    def is_beginning(self, number: int) -> bool:
        """Whether the history is known from its very first epoch."""
        return number > 0 and self.entries[number - 1].previous is None


class _Finder:
    """Looks for snapshots in the tiers; what was loaded or found wanting once is not looked at again."""

    def __init__(self, home: StateHome, walk: _Walk, *, only_look: bool) -> None:
        self._home = home
        self._walk = walk
        self._only_look = only_look
        self._loaded: dict[str, CompleteCheckpoint | CheckpointError] = {}
        self.path = "fresh"

    def find(self, operator: str, limit: int) -> tuple[SnapshotRef | None, CompleteCheckpoint | None]:
        """The newest intact snapshot of an operator that is not newer than `limit`; none: from the very beginning.

        Raises:
            StateLostError: there is none, and the history does not go back to the beginning.
        """
        number, reasons = 0, []
        seen: set[str] = set()
        while (entry := self._walk.get(number)) is not None:
            number += 1
            value = entry.checkpoint.state.get(operator)
            if value is None:
                break
            ref = SnapshotRef.from_json(value)
            if ref.checkpoint in seen or ref.epoch > limit:
                continue
            seen.add(ref.checkpoint)
            found = self._load(ref)
            if isinstance(found, CompleteCheckpoint):
                return ref, found
            reasons.append(found.message)
        if self._walk.is_beginning(number) or (entry is not None and not entry.checkpoint.state):
            logger.warning("state is made from the very beginning", extra={"operator": operator, "reason": reasons[:1]})
            return None, None
        raise StateLostError(
            f"the state of operator {operator!r} is lost: {reasons[0] if reasons else 'no checkpoint names it'}",
            operator=operator,
        )

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
    """The watermarks of a checkpoint under the names that operators have now, of the inputs that they have now."""
    stored = Watermarks.from_json(checkpoint.watermarks) if checkpoint is not None else Watermarks()
    old = {operator.name: operator.renamed_from or operator.name for operator in flow.stateful}
    inputs = {o.name: {port: old.get(port, port) for port in o.inputs} for o in flow.stateful}
    return stored.renamed(old, inputs)


def fed_by(parts: Parts, flow: Dataflow, operator: OperatorOptions) -> list[str]:
    """The stateful operators that an operator's rows reach."""
    reached = {node.name for node in downstream(parts.options, operator.name) if node.kind == "operator"}
    return [other.name for other in flow.stateful if other.name in reached]


def _check_same(parts: Parts, operator: OperatorOptions, complete: CompleteCheckpoint, known: str) -> None:
    """State means what it meant when it was written; ConfigError where the spec would read it as something else."""
    groups, found = complete.plan.key_groups, complete.plan.operators[known]
    if groups != parts.options.state.key_groups:
        raise ConfigError(
            f"the state was made with {groups} key groups, the spec says {parts.options.state.key_groups}",
            hint=f"Set state.key_groups: {groups}; they are fixed for the life of a pipeline, shards are not.",
        )
    if found.type != operator.type or found.shape not in ("", shape_of(operator)):
        what = f"type {found.type}" if found.type != operator.type else "other keys, inputs or windows"
        raise ConfigError(
            f"the state of operator {operator.name!r} was made with {what}",
            hint=f"Set it as it was; or give it a new name, initial_state: empty, and state.dropped: [{known}]",
        )


def check_operators(parts: Parts, flow: Dataflow, held: Held) -> None:
    """State is never lost in silence: what the checkpoint holds must be in the spec, or be given up by name.

    Raises:
        ConfigError: operators were added, removed or renamed, and the spec does not say what becomes of their state.
    """
    if held.checkpoint is None:
        return
    named = held.checkpoint.state
    if not named and _Walk(parts, flow, held).began_afresh:
        return
    spec = {operator.name for operator in flow.stateful}
    renamed = {operator.renamed_from for operator in flow.stateful if operator.renamed_from}
    for name in named:
        if name not in spec | renamed | set(parts.options.state.dropped):
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
