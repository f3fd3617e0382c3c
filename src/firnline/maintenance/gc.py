"""Deletes unneeded files of a table: `gc` deletes what no log names, `vacuum` what commits have removed.

Neither sweeps operator state, which may be elsewhere: see `maintenance.state`.

The steps of `gc`, in this order:
1. List the files. Only what is older than the grace period, by the storage's own clock, is a candidate: orphans, units
   set aside long ago, temporary files.
2. Read everything that names files (`references`). This includes names added after the listing.
3. Delete in batches. Before each batch, read new names and declare the batch in the log (`sweeps`).
4. Keep ledgers small, below the floor: fold old entries, delete entries that no commit names, and quarantine that no
   entry names.
A kill at any point leaves fewer unnamed files, and perhaps a declared batch, which the next sweep finishes.

`vacuum` deletes files that commits removed longer ago than the table's retention; files that no log ever named stay. It
is like delta-rs' lite mode, with three differences. Ages follow the storage's clock and the log's own files, not this
machine's clock. Pins and units, pending or set aside, keep their files. Deletions are declared in the log first
(`sweeps`), so that no rollback brings back a file that is about to be deleted.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from itertools import islice

from firnline.checkpoint.ledger import Ledger, LedgerEntry
from firnline.errors import CheckpointError, ConfigError, DamagedError, SinkError
from firnline.maintenance.references import References
from firnline.maintenance.survey import (
    Candidates,
    Progress,
    Survey,
    TableFile,
    is_inside,
    open_table,
    storage_now,
    survey,
)
from firnline.names import CHANGE_FILE, JOURNAL_COLUMN, entry_txn, epoch_txn
from firnline.sinks.delta.log import DeltaLog
from firnline.sinks.delta.recovery import Found, find_checkpoint
from firnline.sinks.delta.sweeps import Intent, Sweeper, SweepLog
from firnline.sinks.delta.table import Table
from firnline.sinks.known import known_sinks
from firnline.sinks.outbox import list_outbox
from firnline.state.snapshot import exists
from firnline.storage import Storage, is_remote
from firnline.types import Clock, Json

logger = logging.getLogger(__name__)


@dataclass(slots=True)
class LedgerState:
    """One pipeline's ledger according to the log."""

    ledger: Ledger
    found: Found
    floor: int


@dataclass(slots=True)
class Upkeep:
    """What was done to one ledger; in a dry run, what would be done."""

    folded: int = 0
    swept: int = 0
    quarantine: list[TableFile] = field(default_factory=list)


def find_ledger(storage: Storage, table: Table, pipeline: str, oldest_pending: int | None) -> LedgerState | None:
    """Return the ledger's true end and its floor; None before the first commit.

    A unit that is still pending although it is committed is recognized by its entry: those entries stay.

    Raises:
        CheckpointError: no intact copy has the end of the ledger.
    """
    epoch = table.txn(epoch_txn(pipeline))
    if epoch is None:
        return None
    ledger = Ledger(storage, pipeline)
    digest = table.txn(entry_txn(pipeline))
    found = find_checkpoint(DeltaLog(storage), ledger, pipeline, table.version, epoch, digest, _refuse)
    floor = found.checkpoint.floor
    return LedgerState(ledger, found, floor if oldest_pending is None else min(floor, oldest_pending))


def fold(storage: Storage, state: LedgerState) -> Upkeep:
    """Fold and sweep below the floor, as far as no follower may still need an entry."""
    entry, below = state.found.entry, min(state.floor, _oldest_waiting(storage, state))
    return Upkeep(state.ledger.fold(entry, below), state.ledger.sweep(below, entry))


def _oldest_waiting(storage: Storage, state: LedgerState) -> int:
    """Return the oldest epoch that a follower may still be given: one that it was not seen to hold, or that is still in
    the outbox. Followers do not hold back the floor."""
    checkpoint = state.found.checkpoint
    lacking = [one.held + 1 for one in known_sinks(checkpoint).values() if not one.set_aside]
    waiting = list_outbox(storage, checkpoint.pipeline)
    if waiting:
        links = state.ledger.chain(state.found.entry)
        lacking += [one.epoch for one in links if isinstance(one, LedgerEntry) and one.checkpoint.attempt in waiting]
    return min(lacking, default=state.floor)


def unnamed_quarantine(state: LedgerState, files: list[tuple[int, TableFile]]) -> list[TableFile]:
    """Return quarantine files below the floor that no entry of the true chain names: attempts that were not
    committed."""
    old = [file for epoch, file in files if epoch < state.floor]
    if not old:
        return []
    named = {str(q["name"]) for link in state.ledger.chain(state.found.entry) for q in link.quarantine}
    return [file for file in old if file.key.rsplit("/", 1)[-1] not in named]


def keep_up(
    storage: Storage,
    table: Table,
    pipeline: str,
    quarantine: list[tuple[int, TableFile]],
    *,
    oldest_pending: int | None,
    may_fold: bool,
) -> Upkeep:
    """Fold one pipeline's ledger and find its quarantine to sweep.

    Raises:
        CheckpointError: the chain has a hole; nothing of this pipeline was deleted.
    """
    try:
        state = find_ledger(storage, table, pipeline, oldest_pending)
        if state is None:
            return Upkeep()
        doomed = unnamed_quarantine(state, quarantine)
        done = fold(storage, state) if may_fold else Upkeep()
    except FileNotFoundError as error:
        raise SinkError(f"the ledger of {pipeline!r} moved while it was read: {error}") from error
    done.quarantine = doomed
    return done


def _refuse(_positions: dict[str, Json], _inputs: dict[str, list[dict[str, Json]]]) -> dict[str, Json]:
    raise DamagedError("only a run can rebuild a checkpoint from its inputs")


GRACE_SECONDS = 86_400.0
BATCH_FILES = 2000  # declared in one commit
_DELETERS = 8


@dataclass(frozen=True, slots=True)
class Swept:
    """Files of one kind that were deleted, or would be."""

    files: int = 0
    size_bytes: int = 0


@dataclass(frozen=True, slots=True)
class GcReport:
    """The result of `gc`; in a dry run, what it would do."""

    table: str
    dry_run: bool
    version: int
    files: int
    size_bytes: int
    kinds: dict[str, Swept]  # data, changes (of upserts), quarantine, temporary, exchange, rejected (metadata), pins
    kept: dict[str, int]  # Parquet files that stay, by reason
    entries_folded: int
    entries_swept: int
    listed: int
    clock_skew_seconds: float | None  # this machine's clock minus the storage's; no decision depends on it
    stopped: bool = False
    notes: tuple[str, ...] = ()


@dataclass(slots=True)
class Sweep:
    """Deletes files through storage, batch by batch, and counts them. `what` is its name in messages."""

    what: str
    storage: Storage
    table: Table
    dry_run: bool
    progress: Progress | None = None
    stop: Callable[[], bool] | None = None
    kinds: dict[str, Swept] = field(default_factory=dict)
    finished: list[Intent] = field(default_factory=list)  # declared and unfinished batches of other sweeps
    stopped: bool = False

    def delete(self, kind: str, files: Iterable[TableFile]) -> None:
        """Delete files that no table version and no savepoint can ever need."""
        doomed = [f for f in files if is_inside(self.storage, f.key)]
        if not self.dry_run:
            self._delete_keys([f.key for f in doomed])
        self._count(kind, doomed)

    def _count(self, kind: str, files: Sequence[TableFile]) -> None:
        before = self.kinds.get(kind, Swept())
        size_bytes = before.size_bytes + sum(f.size_bytes for f in files)
        self.kinds[kind] = Swept(before.files + len(files), size_bytes)

    def _delete_keys(self, keys: Sequence[str]) -> None:
        inside = [key for key in keys if is_inside(self.storage, key)]
        if is_remote(self.storage.root):
            with ThreadPoolExecutor(_DELETERS) as deleters:
                list(deleters.map(self.storage.delete, inside))
        else:
            for key in inside:
                self.storage.delete(key)

    def finish_others(self) -> None:
        """Finish the declared batches of dead or stalled sweeps."""
        if not self.dry_run:
            self.finished += self._sweeper().finish_open()

    def _sweeper(self) -> Sweeper:
        return Sweeper(
            SweepLog(self.storage, self.table), self.what, lambda key: exists(self.storage, key), self._delete_keys
        )

    def delete_unnamed(self, kind: str, candidates: Candidates, references: References) -> None:
        """Delete candidates in batches. Before each, files that were named meanwhile are removed from it."""
        total, done = len(candidates.files), 0
        sweeper = self._sweeper()
        candidates.drop_where(lambda f: not is_inside(self.storage, f.key), "outside the table")
        while candidates.files and not self.is_stopped():
            if not self.dry_run:
                references.apply(candidates)
            batch = list(islice(candidates.files.values(), BATCH_FILES))
            if batch and not self.dry_run and not self._sweep_batch(sweeper, batch, candidates, references):
                continue
            self._count(kind, [file for file in batch if not CHANGE_FILE.fullmatch(file.key)])
            self._count("changes", [file for file in batch if CHANGE_FILE.fullmatch(file.key)])
            for file in batch:
                del candidates.files[file.key]
            done += len(batch)
            if self.progress is not None and not self.dry_run:
                self.progress("deleting", done, total)

    def _sweep_batch(
        self, sweeper: Sweeper, batch: list[TableFile], candidates: Candidates, references: References
    ) -> bool:
        """Declare and delete a batch. Returns False if one of its files was named meanwhile, or another sweep came
        first."""

        def is_unneeded() -> bool:
            references.apply(candidates)
            return all(file.key in candidates.files for file in batch)

        self.finished += sweeper.finish_open()
        return sweeper.sweep([file.key for file in batch], is_unneeded)

    def is_stopped(self) -> bool:
        self.stopped = self.stopped or (self.stop is not None and self.stop())
        return self.stopped


def gc(
    table: str,
    storage_options: Mapping[str, str] | None = None,
    *,
    grace_seconds: float = GRACE_SECONDS,
    dry_run: bool = False,
    ledgers: Mapping[str, Storage] | None = None,
    progress: Progress | None = None,
    stop: Callable[[], bool] | None = None,
    clock: Clock | None = None,
) -> GcReport:
    """Sweep one table. Safe beside running writers and committers, at every kill point, with a wrong clock.

    Args:
        grace_seconds: Files younger than this, by the storage's clock, stay.
        dry_run: Delete nothing and return what would be deleted; writes one empty probe to read the storage's clock.
        ledgers: The ledgers of pipelines for which this table is not the deciding sink. If a pipeline's ledger is not
            found, its staged files stay.
        stop: Called between batches; True ends the sweep early, in a consistent state.
        clock: This machine's clock, to report its difference from the storage's.

    Raises:
        CheckpointError: a unit, an entry or a pin cannot be read, and might name a file; nothing was deleted.
        SinkError: the table or the storage cannot be read or written; only unnamed files were deleted.
    """
    if grace_seconds < 0:
        raise ConfigError(f"the grace period is {grace_seconds} s; it cannot be negative")
    options = dict(storage_options or {})
    try:
        storage, handle = open_table(table, options)
        now = storage_now(storage)
        skew = (clock.now() - now).total_seconds() if clock is not None else None
        sweep = Sweep("gc", storage, handle, dry_run, progress, stop)
        sweep.finish_others()
        found = survey(storage, now, grace_seconds, progress)  # step 1
        if handle.schema().names == [JOURNAL_COLUMN]:  # it has no data files: those in its folder are somebody else's
            found.data, found.names = Candidates(), set()
        references = References(storage, handle, options, now, ledgers)
        return _sweep(handle, found, references, sweep, skew)
    except OSError as error:
        raise SinkError(f"cannot sweep {table}: {error}", table=table) from error


def _sweep(table: Table, found: Survey, references: References, sweep: Sweep, skew: float | None) -> GcReport:
    references.apply(found.data)  # step 2
    _check_plausible(found, references)
    # Step 3. Metadata of old units that were set aside goes first: without it, their files are ordinary orphans.
    sweep.delete("rejected", references.expired_units)
    sweep.delete("pins", references.expired_pins)
    sweep.delete("temporary", found.temporary)
    for pipeline, files in found.exchange.items():
        if not references.is_at_work(pipeline):  # rows in flight of a live run are deleted when its epoch ends
            sweep.delete("exchange", files)
    sweep.delete_unnamed("data", found.data, references)
    folded = swept = 0
    notes = [*references.notes, *finished_notes(sweep.finished)]
    for pipeline in sorted(references.pipelines):  # step 4
        if sweep.is_stopped():
            break
        try:
            done = keep_up(
                sweep.storage,
                table,
                pipeline,
                found.quarantine.get(pipeline, []),
                oldest_pending=references.oldest_pending.get(pipeline),
                may_fold=not sweep.dry_run and pipeline not in references.live,  # a run folds its ledger itself
            )
        except (CheckpointError, SinkError) as error:
            notes.append(f"the ledger and quarantine of {pipeline} were left alone: {error.message}")
            continue
        sweep.delete("quarantine", done.quarantine)
        folded, swept = folded + done.folded, swept + done.swept
    kinds = {kind: one for kind, one in sweep.kinds.items() if one.files}
    report = GcReport(
        table=table.uri,
        dry_run=sweep.dry_run,
        version=table.version,
        files=sum(one.files for one in kinds.values()),
        size_bytes=sum(one.size_bytes for one in kinds.values()),
        kinds=kinds,
        kept=dict(found.data.kept),
        entries_folded=folded,
        entries_swept=swept,
        listed=found.listed,
        clock_skew_seconds=skew,
        stopped=sweep.stopped,
        notes=tuple(notes),
    )
    logger.info("table swept", extra={"table": report.table, "files": report.files, "size_bytes": report.size_bytes})
    return report


def finished_notes(finished: Iterable[Intent]) -> list[str]:
    """Return the messages about sweeps that did not finish by themselves."""
    return [f"finished what {intent} had declared: {len(intent.files)} file(s)" for intent in finished]


def _check_plausible(found: Survey, references: References) -> None:
    """Refuse to sweep if the listing lacks all files of the log: then names are compared wrongly."""
    if not found.data.files or found.data.kept["named by the log"]:
        return
    named = list(references.log.snapshot())  # files that a pin or a unit names too were counted there
    if named and found.names.isdisjoint(named):
        raise SinkError(
            "not one file that the log names was found in the table's folder",
            hint="Nothing was deleted. Check that the path is the table's own, and not a link or a mount of it.",
        )


@dataclass(frozen=True, slots=True)
class VacuumReport:
    """The result of `vacuum`; in a dry run, what it would do."""

    table: str
    dry_run: bool
    version: int
    retention_hours: float
    files: int
    size_bytes: int
    kept: dict[str, int]  # files that stay although a commit removed them, by reason
    stopped: bool = False
    notes: tuple[str, ...] = ()


def vacuum(
    table: str,
    storage_options: Mapping[str, str] | None = None,
    *,
    retention_hours: float | None = None,
    allow_short_retention: bool = False,
    dry_run: bool = False,
    ledgers: Mapping[str, Storage] | None = None,
    progress: Progress | None = None,
    stop: Callable[[], bool] | None = None,
) -> VacuumReport:
    """Delete removed files whose retention is over.

    Raises:
        ConfigError: `retention_hours` is below the table's retention, without `allow_short_retention`.
        CheckpointError: a unit, an entry or a pin cannot be read, and might name a file; nothing was deleted.
        SinkError: the table or the storage cannot be read or written.
    """
    options = dict(storage_options or {})
    try:
        storage, handle = open_table(table, options)
        now = storage_now(storage)
        sweep = Sweep("vacuum", storage, handle, dry_run, progress, stop)
        sweep.finish_others()
        references = References(storage, handle, options, now, ledgers)
        references.retention = _retention(references.retention, retention_hours, allow_short_retention)
        candidates = _removed(storage, references, now)
        references.apply(candidates)
        sweep.delete_unnamed("data", candidates, references)
    except OSError as error:
        raise SinkError(f"cannot vacuum {table}: {error}", table=table) from error
    done = sweep.kinds.get("data", Swept())
    return VacuumReport(
        table=handle.uri,
        dry_run=dry_run,
        version=handle.version,
        retention_hours=references.retention / timedelta(hours=1),
        files=done.files,
        size_bytes=done.size_bytes,
        kept=dict(candidates.kept),
        stopped=sweep.stopped,
        notes=(*references.notes, *finished_notes(sweep.finished)),
    )


def _retention(of_table: timedelta, hours: float | None, allow_short: bool) -> timedelta:
    if hours is None:
        return of_table
    wanted = timedelta(hours=hours)
    if hours < 0 or (wanted < of_table and not allow_short):
        raise ConfigError(
            f"a retention of {hours:g} h is below the table's own, {of_table / timedelta(hours=1):g} h",
            hint="Readers of older versions may need these files; ask for a short retention expressly if none do.",
        )
    return wanted


def _removed(storage: Storage, references: References, now: datetime) -> Candidates:
    """Return every tombstone whose file still exists."""
    found = Candidates()
    tail = references.log.tail(now, references.retention)
    for key, tombstone in tail.tombstones.items():
        if not is_inside(storage, key):
            continue
        try:
            stat = storage.stat(key)
        except FileNotFoundError:
            continue
        found.files[key] = TableFile(key, stat.size_bytes or tombstone.size_bytes, stat.modified_at)
    return found
