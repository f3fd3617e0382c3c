"""The committer: turns pending units into Delta commits. No Spark, no JVM.

One cycle, in this order:
1. List the pending units and read those that are new.
2. Read the log; arrange each pipeline's units (`chain.arrange`).
3. Validate every unit that is ready, immediately before its commit.
4. Commit: several units per Delta commit, onto exactly the version that was checked.
5. Delete the metadata of units that are committed according to the log. The next cycle repairs a crash in between.

Proof of commit is the transaction in the log, never the presence of a file.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from functools import partial
from typing import TypeVar
from urllib.parse import unquote

import pyarrow as pa

from firnline.checkpoint.codec import short_number
from firnline.clock import monotonic
from firnline.committer.committed import CommittedUnits, load_committed
from firnline.committer.validate import (
    Columns,
    InvalidUnitError,
    check_age,
    check_files,
    distinct,
    first_columns,
    foreign_file,
)
from firnline.errors import (
    CheckpointError,
    CommitConflictError,
    CommitUnknownError,
    DamagedError,
    FencedError,
    FirnlineError,
    NewerFormatError,
    SchemaError,
    SinkError,
)
from firnline.faults import fault_point
from firnline.names import (
    COMMITTER_TXN,
    HOME,
    PENDING,
    committer_probe_key,
    entry_txn,
    epoch_txn,
    ledger_owner,
    pending_unit,
    unit_txn,
)
from firnline.schema import schema_from_json
from firnline.sinks.delta.contents import log_added, missing_fields
from firnline.sinks.delta.durable import check_whole
from firnline.sinks.delta.log import DeltaLog, encode_blizzard
from firnline.sinks.delta.sweeps import Intent, SweepLog
from firnline.sinks.delta.table import (
    DELETED_FILES,
    DELETED_FILES_DEFAULT,
    TRANSACTIONS,
    Table,
    check_put_if_absent,
    find_interval,
)
from firnline.sinks.staged.chain import Arranged, LogHead, arrange, read_log_head
from firnline.sinks.staged.unit import ForeignUnit, Unit, list_units, parse_unit, reject
from firnline.storage import Storage
from firnline.topology.decide import count_until_marker
from firnline.topology.records import markers_in
from firnline.types import Clock, Json

logger = logging.getLogger(__name__)

UNITS_PER_COMMIT = 1000
_READERS = 8
_AT_A_TIME = 16
CHECKPOINT_EVERY = 20  # default of the table property
MAX_ROUNDS = 10_000  # limit of one cycle, so that other tables get their turn
MAX_UNCLEAR = 3  # commits in a row without a clear answer, before the next poll tries again


_Item = TypeVar("_Item")
_Result = TypeVar("_Result")


@dataclass(slots=True)
class CycleReport:
    """The result of one cycle."""

    commits: int = 0
    units: int = 0
    files: int = 0
    rows: int = 0
    rejected: list[tuple[str, str]] = field(default_factory=list)  # unit, reason
    waiting: dict[str, tuple[int, int]] = field(default_factory=dict)  # pipeline -> epochs waited for
    pending: int = 0
    pending_bytes: int = 0
    oldest_pending_seconds: float = 0.0
    alarms: list[str] = field(default_factory=list)
    commit_seconds: list[float] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class _Seen:
    """The table's version and the newest sweep in its log, under which units were checked."""

    version: int
    swept: tuple[int, int]


class Committer:
    """Commits the pending units of one table. One committer is active per table: the owner of the committer's
    transaction."""

    def __init__(
        self, table: Table, storage: Storage, run: str, clock: Clock, *, whole_file_checksums: bool = False
    ) -> None:
        self._table = table
        self._storage = storage
        self._run = run
        self._clock = clock
        self._whole = whole_file_checksums
        self._known: dict[str, Unit | ForeignUnit] = {}
        self._put_at: dict[str, datetime] = {}
        self._term: int | None = None  # the committer's transaction version, once claimed
        self._checkpointed = 0  # version of Delta's own checkpoint
        self._unclear = 0
        self._progress: Callable[[int], None] = lambda _: None
        self._committed = CommittedUnits(storage)
        self._sweeps = SweepLog(storage, self._table)
        self._moved = False  # the log moved: the units must be arranged again

    @property
    def uri(self) -> str:
        return self._table.uri

    def cycle(self, progress: Callable[[int], None] | None = None) -> CycleReport:
        """Commit everything that can be committed now.

        Raises:
            FencedError: another committer took over.
            SinkError: the storage failed; nothing is lost, call again.
        """
        self._progress = progress or self._progress
        self._unclear = 0
        report = CycleReport()
        try:
            self._work(report)
        except OSError as error:
            raise SinkError(f"storage failed: {error}") from error
        return report

    def _work(self, report: CycleReport) -> None:
        self._read_pending(report)
        if not self._known:
            return
        if not self._table.refresh() and not self._create_table(report):
            self._measure(report)
            return
        if self._term is None:
            check_whole(self._storage, self._table.version)
        failures: dict[str, FirnlineError | OSError] = {}
        for _ in range(MAX_ROUNDS):
            before, self._moved = report.units, False
            self._apart("", failures, lambda: self._commit_foreign(report))
            for pipeline in sorted({u.pipeline for u in self._known.values() if isinstance(u, Unit)}):
                self._apart(pipeline, failures, partial(self._commit_pipeline, pipeline, report))
            self._progress(report.units)
            if report.units == before and not self._moved:
                break
        self._measure(report)
        self._warn_of_age(report)
        self._maintain()
        if failures:
            raise next(iter(failures.values()))

    def _create_table(self, report: CycleReport) -> bool:
        """Create the table from the oldest unit of another program. Returns False if there is none.

        A pipeline creates its table itself: if there are traces of a pipeline, the table is still to come, or lost.
        """
        pipelines = {u.pipeline for u in self._known.values() if isinstance(u, Unit)}
        keys = (stat.name.removeprefix(f"{self._storage.root}/") for stat in self._storage.list(HOME))
        pipelines |= {owner for key in keys if (owner := ledger_owner(key)) is not None}
        if pipelines:
            report.alarms.append(
                f"there is no table, but {', '.join(sorted(pipelines))} wrote here: its first run creates the table;"
                " if there was one, restore _delta_log from a backup"
            )
            return False
        for unit in sorted(self._known.values(), key=lambda unit: (self._put_at[unit.name], unit.name)):
            assert isinstance(unit, ForeignUnit)
            try:
                columns, partition_by = first_columns(self._storage, unit)
            except InvalidUnitError as error:
                self._reject(unit.name, str(error), report)
                continue
            check_put_if_absent(self._storage, committer_probe_key(self._run))
            info = json.dumps({"kind": "create", "run": self._run, "units": [unit.name]})
            try:
                self._table.create(columns, partition_by, info, {})
            except (CommitConflictError, CommitUnknownError) as error:
                if not self._table.refresh():
                    raise SinkError(f"cannot create the table {self._table.uri}: {error.message}") from error
            return True
        return False

    def _apart(self, what: str, failures: dict[str, FirnlineError | OSError], work: Callable[[], None]) -> None:
        """Isolate a failure of one pipeline or of foreign units: it is retried at the next poll and blocks no other."""
        if what in failures:
            return
        moved = self._moved
        try:
            work()
        except (SinkError, CheckpointError, OSError) as error:
            failures[what] = error
            self._moved = moved

    # -- reading --------------------------------------------------------------------------------------

    def _read_pending(self, report: CycleReport) -> None:
        """Update the pending units: forget deleted ones, read new ones, set unreadable ones aside."""
        listed = dict(list_units(self._storage, PENDING))
        put_at = {name: stat.modified_at for name, stat in listed.items()}
        # A unit that was put again may have other content.
        self._known = {name: u for name, u in self._known.items() if put_at.get(name) == self._put_at[name]}
        self._put_at = put_at
        new = [name for name in listed if name not in self._known]
        with ThreadPoolExecutor(_READERS) as readers:
            for name, data in zip(new, _spread(readers, self._find_bytes, new), strict=True):
                if data is None:
                    continue
                try:
                    self._known[name] = parse_unit(name, data)
                except NewerFormatError as error:
                    report.alarms.append(error.message)
                except DamagedError as error:
                    self._reject(name, error.message, report)

    def _find_bytes(self, name: str) -> bytes | None:
        try:
            return self._storage.get(pending_unit(name))
        except FileNotFoundError:
            return None

    # -- pipelines ------------------------------------------------------------------------------------

    def _commit_pipeline(self, pipeline: str, report: CycleReport) -> None:
        """Commit the next units of one pipeline. A bad unit blocks only its own pipeline."""
        units = self._units_of(pipeline)
        self._table.refresh()
        seen, columns = _Seen(self._table.version, self._sweeps.newest()), Columns(self._table.schema())
        log_head = read_log_head(self._table, pipeline)
        arranged = arrange(log_head, units)
        self._finish_past(pipeline, log_head, arranged, report)
        for fork in arranged.forks:
            self._reject(fork.name, "fork: another unit has this epoch, or stands before it", report)
        if arranged.gap is not None:
            report.waiting[pipeline] = arranged.gap
        else:
            report.waiting.pop(pipeline, None)
        ready = arranged.ready[:UNITS_PER_COMMIT]
        marked = [bool(markers_in(unit.checkpoint.topology, unit.epoch)) for unit in ready]
        batch = self._valid_prefix(ready[: count_until_marker(marked)], columns, report)
        if batch and self._commit_batch(pipeline, batch, columns.wanted, seen, report):
            self._delete(batch)

    def _units_of(self, pipeline: str) -> list[Unit]:
        return [u for u in self._known.values() if isinstance(u, Unit) and u.pipeline == pipeline]

    def _valid_prefix(self, ready: list[Unit], columns: Columns, report: CycleReport) -> list[Unit]:
        """Return the units before the first that can never be committed."""
        schema_json: list[dict[str, Json]] = []
        declared = schema_from_json(schema_json)
        for number, unit in enumerate(ready):
            self._progress(report.units)
            try:
                if unit.schema != schema_json:
                    schema_json, declared = unit.schema, schema_from_json(unit.schema)
                self._check_spared(str(file["path"]) for file in unit.files)
                check_files(self._storage, unit.files, columns, declared, whole=self._whole)
            except InvalidUnitError as error:
                self._reject(unit.name, str(error), report)
                return ready[:number]
        return ready

    def _check_spared(self, paths: Iterable[str]) -> None:
        """Refuse files that a sweep has declared for deletion, before their existence is checked."""
        found = self._sweeps.find_covering(paths)
        if found is not None:
            raise InvalidUnitError(f"{found[0]} deletes {found[1][0]}")

    def _commit_batch(
        self, pipeline: str, batch: list[Unit], wanted: list[pa.Schema], seen: _Seen, report: CycleReport
    ) -> bool:
        """Make one Delta commit. Returns False if the log moved since `seen` and the units must be arranged again."""
        last = batch[-1]
        self._moved = True  # until the commit is made
        try:
            onto = self._ensure_term()
            if any(self._evolve(columns, onto, last.epoch) for columns in wanted):
                return False
            if self._sweeps.newest() != seen.swept:
                return False  # a sweep came between: its files are checked again
            if onto != seen.version:
                # At exactly the version of the commit: the same units, in the same order. All known units take part,
                # since the tip that a claim adopted may be far beyond this batch.
                again = arrange(read_log_head(self._table, pipeline), self._units_of(pipeline))
                if again.ready[: len(batch)] != batch:
                    return False
            txns = {
                epoch_txn(pipeline): last.epoch,
                entry_txn(pipeline): short_number(last.entry.checksum),
                COMMITTER_TXN: self._term or 0,
            }
            files = [file for unit in batch for file in unit.files]
            info = self._epoch_info(pipeline, batch, onto)
            self._append(files, info, txns, self._interchange(last, onto), report, onto)
        except (CommitConflictError, CommitUnknownError) as error:
            return self._repeat(error)
        self._moved = False
        report.units += len(batch)
        report.rows += sum(int(f["rows"]) for f in files)
        return True

    def _repeat(self, error: CommitConflictError | CommitUnknownError) -> bool:
        """Return False, so that the caller reads the log again; raise after too many lost answers in a row."""
        self._unclear = self._unclear + 1 if isinstance(error, CommitUnknownError) else 0
        if self._unclear >= MAX_UNCLEAR:
            self._unclear = 0
            raise error
        logger.info("commit repeated", extra={"reason": error.message})
        return False

    def _append(
        self,
        files: list[dict[str, Json]],
        info: str,
        txns: dict[str, int],
        expiring: dict[str, int],
        report: CycleReport,
        onto: int,
    ) -> None:
        began = monotonic()
        self._table.append("delta.commit", files, info, txns, expiring, onto=onto)
        report.commit_seconds.append(monotonic() - began)
        report.commits += 1
        report.files += len(files)
        self._unclear = 0

    def _epoch_info(self, pipeline: str, batch: list[Unit], onto: int) -> str:
        last = batch[-1]
        files = [file for unit in batch for file in unit.files]
        return json.dumps(
            {
                "kind": "epoch",
                "pipeline": pipeline,
                "run": self._run,
                "generation": last.generation,
                "epoch": last.epoch,
                "checkpoint": last.checkpoint.to_json(),
                "entry": last.entry.to_json(),
                "units": [{"epoch": u.epoch, "unit": u.name, "attempt": u.checkpoint.attempt} for u in batch],
                "delta_version": onto,
                "rows": sum(int(f["rows"]) for f in files),
                "size_bytes": sum(int(f["size_bytes"]) for f in files),
            },
            separators=(",", ":"),
        )

    def _interchange(self, unit: Unit, onto: int) -> dict[str, int]:
        """Return the progress for other tools, if the unit's writer says that it belongs into this table."""
        if unit.source_state is None:
            return {}
        extra = {
            "pipeline": unit.pipeline,
            "epoch": unit.epoch,
            "generation": unit.generation,
            "entry": unit.entry.to_json(),
        }
        return {encode_blizzard(unit.source_state, onto, extra): self._now_ms()}

    def _finish_past(self, pipeline: str, log_head: LogHead, arranged: Arranged[Unit], report: CycleReport) -> None:
        """Handle units at or below the log's epoch: committed ones lose their metadata, others are forks."""
        if not arranged.past:
            return
        oldest = min(u.epoch for u in arranged.past)
        committed = load_committed(self._storage, self._table.version, pipeline, log_head, oldest)
        self._delete(u for u in arranged.past if u.checkpoint.attempt in committed.attempts)
        unknown = 0
        for unit in arranged.past:
            if unit.checkpoint.attempt in committed.attempts:
                continue
            if unit.epoch >= committed.since:
                self._reject(unit.name, f"fork: epoch {unit.epoch} was committed from another unit", report)
            else:
                unknown += 1
        if unknown:
            report.alarms.append(f"{pipeline}: {unknown} units stay listed: ledger and log no longer tell their epochs")

    # -- other writers' files -------------------------------------------------------------------------

    def _commit_foreign(self, report: CycleReport) -> None:
        """Commit files of other programs, each once: a transaction per unit proves it."""
        waiting = [u for u in self._known.values() if isinstance(u, ForeignUnit)]
        if not waiting:
            return
        retention = find_interval(self._table, TRANSACTIONS)
        with ThreadPoolExecutor(_READERS) as readers:
            for start in range(0, len(waiting), UNITS_PER_COMMIT):
                self._table.refresh()
                now = self._clock.now()
                self._committed.follow(self._table.version, now - retention if retention is not None else None)
                part = waiting[start : start + UNITS_PER_COMMIT]
                self._delete(unit for unit in part if unit.name in self._committed)
                left = [unit for unit in part if unit.name not in self._committed]
                swept, doomed = self._sweeps.newest(), self._sweeps.find_open()
                batch: list[tuple[ForeignUnit, dict[str, Json]]] = []
                for unit, found in zip(
                    left, _spread(readers, partial(self._examine, now, retention, doomed), left), strict=True
                ):
                    if isinstance(found, InvalidUnitError):
                        self._reject(unit.name, str(found), report)
                    else:
                        batch.append((unit, found))
                self._progress(report.units)
                if batch and self._commit_foreign_batch(batch, swept, report):
                    self._delete(unit for unit, _ in batch)

    def _examine(
        self, now: datetime, retention: timedelta | None, doomed: Intent | None, unit: ForeignUnit
    ) -> dict[str, Json] | InvalidUnitError:
        try:
            if doomed is not None and not doomed.files.isdisjoint((unit.path, unquote(unit.path))):
                raise InvalidUnitError(f"{doomed} deletes {unit.path}")
            check_age(self._put_at[unit.name], now, retention)
            return foreign_file(self._table, self._storage, unit, whole=self._whole)
        except InvalidUnitError as error:
            return error

    def _commit_foreign_batch(
        self, batch: list[tuple[ForeignUnit, dict[str, Json]]], swept: tuple[int, int], report: CycleReport
    ) -> bool:
        self._moved = True
        try:
            onto = self._ensure_term()
            self._committed.follow(onto)
            if self._sweeps.newest() != swept or any(unit.name in self._committed for unit, _ in batch):
                return False  # a sweep came between, or another writer committed one of them
            if any(self._evolve(columns, onto) for columns in distinct(file["columns"] for _, file in batch)):
                return False
            info = json.dumps({"kind": "units", "run": self._run, "units": [u.name for u, _ in batch]})
            expiring = {unit_txn(unit.name): self._now_ms() for unit, _ in batch}
            files = {str(file["path"]): file for _, file in batch}  # two units may name the same file
            for path in files:
                self._storage.settle(path)  # other programs seldom fsync their files
            self._append(list(files.values()), info, {COMMITTER_TXN: self._term or 0}, expiring, report, onto)
        except (CommitConflictError, CommitUnknownError) as error:
            return self._repeat(error)
        self._moved = False
        report.units += len(batch)
        report.rows += sum(unit.record_count for unit, _ in batch)
        return True

    # -- the committer's own place --------------------------------------------------------------------

    def _ensure_term(self) -> int:
        """Take over as the committer with a separate commit, before the first data.

        Returns the version of that commit: data is committed onto that one only.
        """
        self._table.refresh()
        if self._term is None:
            at = self._table.version
            wanted = (self._table.txn(COMMITTER_TXN) or 0) + 1
            info = json.dumps({"kind": "committer", "run": self._run, "term": wanted})
            self._table.append("delta.claim", [], info, {COMMITTER_TXN: wanted}, {}, onto=at)
            self._term = wanted
            self._table.refresh()
        version = self._table.version
        if self._table.txn(COMMITTER_TXN) != self._term:
            self._term = None
            raise FencedError(
                "another committer took over this table", hint="It goes on alone; see `firnline staging`."
            )
        return version

    def _evolve(self, wanted: pa.Schema, onto: int, epoch: int | None = None) -> bool:
        """Add the columns that a unit needs, before its data. Returns True if the version moved.

        `epoch` is None for a unit of another tool.
        """
        try:
            before = self._table.schema()
            missing = missing_fields(before, wanted)
        except SchemaError as error:
            raise SinkError(f"the table changed while a unit was validated: {error.message}") from error
        if missing:
            self._table.add_columns(pa.schema(missing), onto=onto)
            log_added(self._table.uri, before, missing, epoch)
        return bool(missing)

    # -- after the commit -----------------------------------------------------------------------------

    def _delete(self, units: Iterable[Unit | ForeignUnit]) -> None:
        """Delete the metadata of units that are committed according to the log, once the log itself is durable."""
        self._table.make_durable()
        for unit in units:
            fault_point("staging.delete.before")
            self._storage.delete(pending_unit(unit.name))
            fault_point("staging.delete.after")
            self._known.pop(unit.name, None)

    def _reject(self, name: str, reason: str, report: CycleReport) -> None:
        reject(self._storage, name, reason, self._clock)
        self._known.pop(name, None)
        report.rejected.append((name, reason))

    def _measure(self, report: CycleReport) -> None:
        report.pending = len(self._known)
        report.pending_bytes = sum(_unit_bytes(u) for u in self._known.values())
        ages = [(self._clock.now() - self._put_at[name]).total_seconds() for name in self._known]
        report.oldest_pending_seconds = max(ages, default=0.0)

    def _warn_of_age(self, report: CycleReport) -> None:
        """Warn of old units: another tool's VACUUM deletes unnamed files older than the table's retention."""
        retention = find_interval(self._table, DELETED_FILES) or DELETED_FILES_DEFAULT
        if report.oldest_pending_seconds > retention.total_seconds() / 2:
            days = report.oldest_pending_seconds / 86_400
            report.alarms.append(
                f"a unit has been pending for {days:.1f} days, more than half of what the table keeps deleted files "
                f"({retention.total_seconds() / 86_400:.1f} days): a VACUUM may delete its files"
            )

    def _maintain(self) -> None:
        """Write Delta's own checkpoint if due, whoever made the commits: writers leave it to the committer."""
        interval = int(self._table.setting("delta.checkpointInterval") or CHECKPOINT_EVERY)
        self._table.refresh()
        if self._table.version - self._checkpointed < interval:
            return
        self._checkpointed = max(0, DeltaLog(self._storage).checkpoint_version())
        if self._table.version - self._checkpointed >= interval:
            self._table.checkpoint()
            self._checkpointed = self._table.version

    def _now_ms(self) -> int:
        return int(self._clock.now().timestamp() * 1000)


def _spread(pool: ThreadPoolExecutor, work: Callable[[_Item], _Result], items: list[_Item]) -> Iterator[_Result]:
    """Like `pool.map`, in small batches: submitting each item separately costs more than the work."""
    parts = [items[start : start + _AT_A_TIME] for start in range(0, len(items), _AT_A_TIME)]
    for found in pool.map(lambda part: [work(item) for item in part], parts):
        yield from found


def _unit_bytes(unit: Unit | ForeignUnit) -> int:
    return unit.size_bytes if isinstance(unit, ForeignUnit) else sum(int(f["size_bytes"]) for f in unit.files)
