"""Reads one epoch from every copy (ledger, log, store) and reports which copies are intact.

Writes nothing and starts no JVM. The ledger's chain is the truth; the other copies are compared with it.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import islice

from firnline.checkpoint.ledger import Fold, LedgerEntry
from firnline.checkpoint.model import Checkpoint
from firnline.errors import CheckpointError, ConfigError, DamagedError, FirnlineError, LedgerHoleError, NewerFormatError
from firnline.history.store import savepoint_epochs
from firnline.run.open_pipeline import OpenPipeline
from firnline.sinks.base import Head, LoggedCommit, Sink
from firnline.stores.base import CheckpointStore
from firnline.stores.record import CheckpointRecord
from firnline.stores.transfer import Version, parse_record, walk_versions
from firnline.types import EntryRef, Json

STEPS_DRIFT = 100  # how far versions of the store may have drifted from epochs


@dataclass(frozen=True, slots=True)
class Copy:
    """One copy of an epoch's checkpoint. `status`: intact, damaged, differs, folded, missing."""

    where: str  # ledger, commitInfo, store
    status: str
    place: str = ""  # which entry, table version or store version
    detail: str = ""
    checkpoint: Checkpoint | None = None

    def to_json(self) -> dict[str, Json]:
        return {"where": self.where, "status": self.status, "place": self.place, "detail": self.detail}


@dataclass(frozen=True, slots=True)
class SinkView:
    """A sink's part of an epoch; None where no record is left."""

    name: str
    holds: bool
    version: int | None = None
    committed_at: str | None = None
    rows: int | None = None
    size_bytes: int | None = None

    def to_json(self) -> dict[str, Json]:
        return {
            "name": self.name,
            "holds": self.holds,
            "version": self.version,
            "committed_at": self.committed_at,
            "rows": self.rows,
            "size_bytes": self.size_bytes,
        }


@dataclass(frozen=True, slots=True)
class EpochView:
    """All known facts of one epoch."""

    checkpoint: Checkpoint
    kind: str
    entry: EntryRef | None
    ledger_entry: LedgerEntry | None
    record: CheckpointRecord | None
    undone: bool  # a later rollback, fresh start or restore superseded it
    is_savepoint: bool
    copies: tuple[Copy, ...]
    sinks: tuple[SinkView, ...]
    durations_ms: dict[str, int] = field(default_factory=dict)

    @property
    def epoch(self) -> int:
        return self.checkpoint.epoch


def load_epoch(pipeline: OpenPipeline, store: CheckpointStore | None, epoch: int) -> EpochView:
    """Read one epoch.

    Raises:
        ConfigError: it is unknown; the message names the nearest known one.
    """
    head = pipeline.load()
    walk = _walk_chain(pipeline, head, epoch)
    logged = find_logged(pipeline.deciding, head.version, epoch) if head.exists else None
    version = find_version(store, pipeline.options.name, epoch) if store is not None else None
    record = version.record if version else None
    entry, ref, in_ledger = _ledger_copy(
        pipeline, walk, [logged.entry if logged else None, record.entry if record else None]
    )
    copies = [in_ledger]
    if pipeline.deciding.has_log:
        missing = Copy("commitInfo", "missing", detail="not in the table's log")
        copies.append(logged.copy() if logged else missing)
    if store is not None:
        copies.append(_store_copy(version))
    chosen = next((copy.checkpoint for copy in copies if copy.checkpoint is not None), None)
    if chosen is None:
        raise _unknown(pipeline, store, head, epoch, walk)
    return EpochView(
        checkpoint=chosen,
        kind=entry.kind if entry else (record.kind if record else (logged.kind if logged else "epoch")),
        entry=ref or (record.entry if record else None),
        ledger_entry=entry,
        record=record,
        undone=walk.undone,
        is_savepoint=epoch in savepoint_epochs(pipeline),
        copies=tuple(_compared(copy, chosen) for copy in copies),
        sinks=tuple(_sink_views(pipeline, epoch, entry, record, undone=walk.undone)),
        durations_ms={**(entry.durations_ms if entry else {}), **(record.durations_ms if record else {})},
    )


def _compared(copy: Copy, chosen: Checkpoint) -> Copy:
    """Mark a copy that is intact but differs from the true checkpoint."""
    if copy.checkpoint is None or copy.checkpoint.checksum == chosen.checksum:
        return copy
    return Copy(copy.where, "differs", copy.place, "it is intact, but not what the ledger holds", copy.checkpoint)


@dataclass(frozen=True, slots=True)
class RecordedSteps:
    """How long each step of an epoch took, and when its checkpoint was recorded, as the store has it."""

    durations_ms: dict[str, int]
    recorded_at: str


def load_steps(store: CheckpointStore, pipeline: str, newest: int, oldest: int) -> dict[int, RecordedSteps]:
    """Return the steps of the epochs from `newest` down to `oldest`, as far as the store has them near one another."""
    first = next(walk_versions(store, pipeline), None)
    if first is None or first.record is None:
        return {}
    # Versions and epochs grow together; where they have drifted apart, a few epochs may be missing.
    before = first.version - max(0, first.record.epoch - newest) + STEPS_DRIFT
    found: dict[int, RecordedSteps] = {}
    for version in islice(walk_versions(store, pipeline, before), newest - oldest + 2 * STEPS_DRIFT):
        if version.record is None:
            continue
        if version.record.epoch < oldest:
            break
        if version.record.epoch <= newest:
            steps = RecordedSteps(version.record.durations_ms, version.created_at)
            found.setdefault(version.record.epoch, steps)
    return found


# -- the ledger -----------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Walk:
    """The result of a walk down the ledger chain."""

    entry: LedgerEntry | None = None
    ref: EntryRef | None = None
    folded: bool = False
    undone: bool = False
    hole: str = ""


def _walk_chain(pipeline: OpenPipeline, head: Head, epoch: int) -> _Walk:
    ref, undone = head.entry, False
    try:
        for link in pipeline.ledger.chain(head.entry):
            undone = undone or link.supersedes(epoch)
            if isinstance(link, Fold):
                if link.last.epoch >= epoch:
                    return _Walk(folded=link.first_epoch <= epoch and not undone, undone=undone)
            elif link.epoch == epoch:
                return _Walk(link, ref)
            elif link.epoch < epoch:
                break
            ref = link.previous
    except LedgerHoleError as error:
        return _Walk(ref=ref if ref is not None and ref.epoch == epoch else None, hole=error.message)
    return _Walk(undone=undone)


def _ledger_copy(
    pipeline: OpenPipeline, walk: _Walk, named: list[EntryRef | None]
) -> tuple[LedgerEntry | None, EntryRef | None, Copy]:
    """Return the copy in the ledger: on the chain, or superseded and named by another copy."""
    if walk.entry is not None and walk.ref is not None:
        return walk.entry, walk.ref, Copy("ledger", "intact", walk.ref.name, checkpoint=walk.entry.checkpoint)
    if walk.ref is not None:
        return None, walk.ref, Copy("ledger", "damaged", walk.ref.name, walk.hole)
    for ref in named:
        if ref is None:
            continue
        if walk.folded:
            return None, ref, Copy("ledger", "folded", ref.name, "its files are kept in a fold, the rest is not")
        try:
            entry = pipeline.ledger.load(ref)
        except (LedgerHoleError, DamagedError) as error:
            return None, ref, Copy("ledger", "missing", ref.name, error.message)
        return entry, ref, Copy("ledger", "intact", ref.name, checkpoint=entry.checkpoint)
    return None, None, Copy("ledger", "folded" if walk.folded else "missing", detail=walk.hole)


# -- the log --------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Logged:
    """The commit of an epoch in a table's log, and the copy of the checkpoint in it."""

    version: int
    committed_at: str
    kind: str
    entry: EntryRef | None
    checkpoint: Checkpoint | None
    status: str = "intact"
    problem: str = ""
    rows: int | None = None
    size_bytes: int | None = None

    def copy(self) -> Copy:
        return Copy("commitInfo", self.status, f"version {self.version}", self.problem, self.checkpoint)


def find_logged(sink: Sink, version: int, epoch: int) -> Logged | None:
    """Return the commit that made an epoch true; None if the log does not reach back to it."""
    for commit in sink.read_log(version):
        if commit.epoch is None:
            continue
        if commit.epoch < epoch:
            return None
        if commit.epoch == epoch:
            return _read_logged(commit)
        if epoch in [int(unit["epoch"]) for unit in commit.info.get("units") or []]:
            told = f"committed together with epoch {commit.info['epoch']}, whose checkpoint alone stands there"
            return Logged(commit.version, commit.time, "epoch", None, None, "missing", told)
    return None


def _read_logged(commit: LoggedCommit) -> Logged:
    version, time, info = commit.version, commit.time, commit.info
    if commit.problem:
        return Logged(version, time, "epoch", None, None, "damaged", commit.problem)
    try:
        if info.get("kind") == "claim":  # the epoch that took over another tool's progress
            return Logged(version, time, "baseline", None, None, "missing", "a claim carries none")
        return Logged(
            version=version,
            committed_at=time,
            kind=str(info["kind"]),
            entry=EntryRef.from_json(info["entry"]),
            checkpoint=Checkpoint.from_json(info["checkpoint"], f"commit {version}"),
            rows=int(info["rows"]),
            size_bytes=int(info["size_bytes"]),
        )
    except (DamagedError, NewerFormatError) as error:
        return Logged(version, time, "epoch", None, None, "damaged", error.message)
    except (KeyError, TypeError, ValueError) as error:
        return Logged(version, time, "epoch", None, None, "damaged", f"commit {version} lacks {error}")


# -- the store ------------------------------------------------------------------------------------------


def find_version(store: CheckpointStore, pipeline: str, epoch: int) -> Version | None:
    """Return the newest store version that records an epoch, or the damaged version in its place."""
    guessed = False
    suspect: Version | None = None
    for version in walk_versions(store, pipeline):
        if version.record is None:
            suspect = version
            continue
        if version.record.epoch == epoch:
            return version
        if version.record.epoch < epoch:
            break
        suspect = None
        if not guessed:  # usually each epoch made one version
            guessed = True
            guess = _find_at(store, pipeline, version.version - (version.record.epoch - epoch), epoch)
            if guess is not None:
                return guess
    return suspect


def _find_at(store: CheckpointStore, pipeline: str, number: int, epoch: int) -> Version | None:
    if number < 1:
        return None
    info = next(iter(store.list_versions(pipeline, before=number + 1, limit=1)), None)
    data = store.get_version_raw(pipeline, number)
    if info is None or data is None:
        return None
    try:
        record = parse_record(data, f"version {number}")
    except (DamagedError, NewerFormatError):
        return None
    return Version(number, info.created_at, len(data), info.note, record) if record.epoch == epoch else None


def _store_copy(version: Version | None) -> Copy:
    if version is None:
        return Copy("store", "missing", detail="the store has no version of it")
    place = f"version {version.version}"
    if version.record is None:
        return Copy("store", "damaged", place, version.problem)
    return Copy("store", "intact", place, checkpoint=version.record.checkpoint)


# -- the sinks ------------------------------------------------------------------------------------------


def _sink_views(
    pipeline: OpenPipeline, epoch: int, entry: LedgerEntry | None, record: CheckpointRecord | None, *, undone: bool
) -> Iterator[SinkView]:
    for sink in pipeline.sinks:
        head = sink.load()
        logged = find_logged(sink, head.version, epoch) if head.exists else None
        told = record.sinks.get(sink.name, {}) if record else {}
        rows, size = (logged.rows, logged.size_bytes) if logged else (None, None)
        if entry is not None and rows is None:
            files = entry.staged.get(sink.name, [])
            rows = sum(int(f["rows"]) for f in files)
            size = sum(int(f["size_bytes"]) for f in files)
        yield SinkView(
            name=sink.name,
            holds=head.epoch >= epoch and not undone,
            version=logged.version if logged else told.get("version"),
            committed_at=logged.committed_at if logged else None,
            rows=rows if rows is not None else told.get("rows"),
            size_bytes=size if size is not None else told.get("size_bytes"),
        )


# -- what is known --------------------------------------------------------------------------------------


def known_epochs(pipeline: OpenPipeline, store: CheckpointStore | None, head: Head) -> set[int]:
    """Return every epoch that can be shown, as far as the chain and the store are readable."""
    found: set[int] = set()
    with contextlib.suppress(LedgerHoleError):  # epochs behind the hole may still be in the store
        for entry in pipeline.entries(head.entry):
            found.add(entry.epoch)
    if store is not None:
        found |= {v.record.epoch for v in walk_versions(store, pipeline.options.name) if v.record is not None}
    return found


def _unknown(
    pipeline: OpenPipeline, store: CheckpointStore | None, head: Head, epoch: int, walk: _Walk
) -> FirnlineError:
    known = known_epochs(pipeline, store, head)
    nearest = min(known, key=lambda e: (abs(e - epoch), e), default=None)
    told = f"; the nearest known is {nearest}" if nearest is not None else "; there is no checkpoint yet"
    hint = f"firnline checkpoints show {nearest}" if nearest is not None else "`firnline run` makes the first."
    if walk.hole:
        return CheckpointError(f"epoch {epoch} cannot be read: {walk.hole}{told}", hint=hint)
    if walk.folded:
        where = "the checkpoint store has no copy of it" if store is not None else "there is no checkpoint store"
        return ConfigError(f"epoch {epoch} is folded away in the ledger, and {where}{told}", hint=hint)
    return ConfigError(f"epoch {epoch} is not known{told}", hint=hint, unknown="epoch")
