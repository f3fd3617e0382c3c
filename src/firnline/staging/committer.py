"""The committer: turns pending units into Delta commits. No Spark, no JVM.

One cycle, in this order:
1. List the pending units and read those that are new.
2. Read the log; sort each pipeline's units out (`chain.arrange`).
3. Validate every unit that is ready, immediately before its commit.
4. Commit: several units per Delta commit, onto exactly the version whose standing was checked.
5. Delete the metadata of what the log proves committed. A crash in between is repaired by the next cycle.

Proof of commit is the transaction in the log, never the presence of a file.
"""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field

import pyarrow as pa

from firnline.checkpoint.codec import short_number
from firnline.checkpoint.ledger import Fold, Ledger
from firnline.errors import (
    CommitConflictError,
    CommitUnknownError,
    DamagedError,
    FencedError,
    LedgerHoleError,
    NewerFormatError,
    SchemaError,
    SinkError,
)
from firnline.faults import fault_point
from firnline.schema import schema_from_json
from firnline.sinks.delta.columns import missing_fields
from firnline.sinks.delta.log import encode_blizzard
from firnline.sinks.delta.table import CREATED_WITH, Table
from firnline.staging.chain import Arranged, arrange
from firnline.staging.committed import CommittedUnits
from firnline.staging.foreign import foreign_file, unit_id
from firnline.staging.rejected import reject
from firnline.staging.standing import read_standing
from firnline.staging.unit import PENDING, SUFFIX, ForeignUnit, Unit, parse_unit
from firnline.staging.validate import InvalidUnitError, check_files
from firnline.storage import Storage
from firnline.types import Clock, EntryRef, Json

logger = logging.getLogger(__name__)

UNITS_PER_COMMIT = 1000
COMMITTER = "firnline-committer"
_READERS = 8
CHECKPOINT_EVERY = 20
MAX_ROUNDS = 10_000  # of one cycle; a cycle that long only gives others their turn


@dataclass(slots=True)
class CycleReport:
    """What one cycle did and saw."""

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


class Committer:
    """Commits the pending units of one table. One is active per table: the holder of the committer's transaction."""

    def __init__(
        self, table: Table, storage: Storage, run: str, clock: Clock, *, whole_file_checksums: bool = False
    ) -> None:
        self._table = table
        self._storage = storage
        self._run = run
        self._clock = clock
        self._whole = whole_file_checksums
        self._known: dict[str, Unit | ForeignUnit] = {}
        self._term: int | None = None  # the committer's transaction version, once claimed
        self._since_checkpoint = 0
        self._committed = CommittedUnits(storage)
        self._moved = False  # the log moved under us: what was sorted out must be sorted out again

    @property
    def uri(self) -> str:
        return self._table.uri

    def cycle(self, progress: Callable[[int], None] | None = None) -> CycleReport:
        """Commit whatever can be committed now.

        Raises:
            FencedError: another committer took over.
            SinkError: the storage failed; nothing is lost, call again.
        """
        report = CycleReport()
        self._read_pending(report)
        if not self._known or not self._table.refresh():
            self._measure(report)
            return report
        for _ in range(MAX_ROUNDS):
            before, self._moved = report.units, False
            self._commit_foreign(report)
            for pipeline in sorted({u.pipeline for u in self._known.values() if isinstance(u, Unit)}):
                self._commit_pipeline(pipeline, report)
            if progress is not None:
                progress(report.units)
            if report.units == before and not self._moved:
                break
        self._measure(report)
        self._maintain()
        return report

    # -- reading --------------------------------------------------------------------------------------

    def _read_pending(self, report: CycleReport) -> None:
        """Follow the folder: forget what is gone, read what is new, set aside what cannot be read."""
        listed = {}
        for stat in self._storage.list(PENDING):
            name = stat.name.rsplit("/", 1)[-1]
            if name.endswith(SUFFIX) and not name.startswith("."):
                listed[name.removesuffix(SUFFIX)] = stat
        self._known = {name: unit for name, unit in self._known.items() if name in listed}
        new = [name for name in listed if name not in self._known]
        with ThreadPoolExecutor(_READERS) as readers:
            for name, data in zip(new, readers.map(self._find_bytes, new), strict=True):
                if data is None:
                    continue
                try:
                    self._known[name] = parse_unit(name, data)
                except NewerFormatError as error:
                    report.alarms.append(error.message)
                except DamagedError as error:
                    self._reject(name, error.message, report)
        now = self._clock.now()
        ages = [(now - stat.modified_at).total_seconds() for stat in listed.values()]
        report.oldest_pending_seconds = max(ages, default=0.0)

    def _find_bytes(self, name: str) -> bytes | None:
        try:
            return self._storage.get(f"{PENDING}/{name}{SUFFIX}")
        except FileNotFoundError:
            return None

    # -- pipelines ------------------------------------------------------------------------------------

    def _commit_pipeline(self, pipeline: str, report: CycleReport) -> None:
        """Commit the next units of one pipeline; a bad unit holds up only its own pipeline."""
        units = [u for u in self._known.values() if isinstance(u, Unit) and u.pipeline == pipeline]
        self._table.refresh()
        arranged = arrange(read_standing(self._table, pipeline), units)
        self._finish_past(pipeline, arranged, report)
        for fork in arranged.forks:
            self._reject(fork.name, "fork: another unit has this epoch, or stands before it", report)
        if arranged.gap is not None:
            report.waiting[pipeline] = arranged.gap
        batch = self._valid_prefix(arranged.ready[:UNITS_PER_COMMIT], report)
        if batch and self._commit_batch(pipeline, batch, report):
            self._delete(batch)

    def _valid_prefix(self, ready: list[Unit], report: CycleReport) -> list[Unit]:
        """The units up to the first that can never be committed."""
        columns = self._table.schema()
        for number, unit in enumerate(ready):
            try:
                check_files(self._storage, unit.files, columns, schema_from_json(unit.schema), whole=self._whole)
            except InvalidUnitError as error:
                self._reject(unit.name, str(error), report)
                return ready[:number]
            columns = _widened(columns, schema_from_json(unit.schema))
        return ready

    def _commit_batch(self, pipeline: str, batch: list[Unit], report: CycleReport) -> bool:
        """One Delta commit; False when the log moved and the units must be sorted out again."""
        last = batch[-1]
        self._moved = True  # until the commit stands
        try:
            self._ensure_term()
            for unit in batch:
                if self._evolve(schema_from_json(unit.schema)):
                    return False
            # Under the very version that is committed onto: the same units, in the same order.
            if arrange(read_standing(self._table, pipeline), batch).ready != batch:
                return False
            txns = {
                f"firnline:{pipeline}": last.epoch,
                f"firnline-entry:{pipeline}": short_number(last.entry.checksum),
                COMMITTER: self._term or 0,
            }
            files = [file for unit in batch for file in unit.files]
            self._append(files, self._epoch_info(pipeline, batch), txns, self._interchange(last), report)
        except (CommitConflictError, CommitUnknownError) as error:
            logger.info("commit repeated", extra={"reason": error.message})
            return False
        self._moved = False
        report.units += len(batch)
        report.rows += sum(int(f["rows"]) for f in files)
        return True

    def _append(
        self,
        files: list[dict[str, Json]],
        info: str,
        txns: dict[str, int],
        expiring: dict[str, int],
        report: CycleReport,
    ) -> None:
        self._check_term()
        began = time.perf_counter()
        self._table.append("delta.commit", files, info, txns, expiring)
        report.commit_seconds.append(time.perf_counter() - began)
        report.commits += 1
        report.files += len(files)
        self._since_checkpoint += 1

    def _epoch_info(self, pipeline: str, batch: list[Unit]) -> str:
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
                "units": [{"epoch": u.epoch, "unit": u.name} for u in batch],
                "delta_version": self._table.version,
                "rows": sum(int(f["rows"]) for f in files),
                "size_bytes": sum(int(f["size_bytes"]) for f in files),
            },
            separators=(",", ":"),
        )

    def _interchange(self, unit: Unit) -> dict[str, int]:
        key = "delta.setTransactionRetentionDuration"
        if unit.source_state is None or self._table.setting(key) != CREATED_WITH[key]:
            return {}
        extra = {
            "pipeline": unit.pipeline,
            "epoch": unit.epoch,
            "generation": unit.generation,
            "entry": unit.entry.to_json(),
        }
        return {encode_blizzard(unit.source_state, self._table.version, extra): self._now_ms()}

    def _finish_past(self, pipeline: str, arranged: Arranged, report: CycleReport) -> None:
        """Units at or below the log's epoch: committed ones lose their metadata, others are forks."""
        if not arranged.past:
            return
        committed = self._committed_attempts(pipeline, min(u.epoch for u in arranged.past))
        if committed is None:
            report.alarms.append(f"{pipeline}: the ledger has a hole; committed units stay listed")
            return
        done = [u for u in arranged.past if u.checkpoint.attempt in committed]
        self._delete(done)
        for unit in arranged.past:
            if unit not in done:
                self._reject(unit.name, f"fork: epoch {unit.epoch} was committed from another unit", report)

    def _committed_attempts(self, pipeline: str, oldest: int) -> set[str] | None:
        """Attempts that the chain of committed entries names, back to an epoch; None when it cannot be told."""
        digest = self._table.txn(f"firnline-entry:{pipeline}")
        epoch = self._table.txn(f"firnline:{pipeline}") or 0
        ledger = Ledger(self._storage, pipeline)
        tip: EntryRef | None = next(
            (ref for ref, _ in ledger.candidates(epoch) if short_number(ref.checksum) == digest), None
        )
        if tip is None:
            return None
        found: set[str] = set()
        try:
            for link in ledger.chain(tip):
                if isinstance(link, Fold):
                    return None
                found.add(link.checkpoint.attempt)
                if link.epoch <= oldest:
                    break
        except LedgerHoleError:
            return None
        return found

    # -- other writers' files -------------------------------------------------------------------------

    def _commit_foreign(self, report: CycleReport) -> None:
        """Commit files that other programs brought, each once: a transaction per unit proves it."""
        waiting = [u for u in self._known.values() if isinstance(u, ForeignUnit)]
        for start in range(0, len(waiting), UNITS_PER_COMMIT):
            batch: list[tuple[ForeignUnit, dict[str, Json]]] = []
            self._table.refresh()
            self._committed.follow(self._table.version)
            done = []
            for unit in waiting[start : start + UNITS_PER_COMMIT]:
                if unit.name in self._committed:
                    done.append(unit)
                    continue
                try:
                    batch.append((unit, foreign_file(self._table, self._storage, unit, self._clock.now())))
                except InvalidUnitError as error:
                    self._reject(unit.name, str(error), report)
            self._delete(done)
            if batch and self._commit_foreign_batch(batch, report):
                self._delete([unit for unit, _ in batch])

    def _commit_foreign_batch(self, batch: list[tuple[ForeignUnit, dict[str, Json]]], report: CycleReport) -> bool:
        version = self._table.version
        self._moved = True
        try:
            self._ensure_term()
            if self._table.version != version:
                return False  # somebody may have committed one of them: look again
            wanted = {file["columns"].to_string(): file["columns"] for _, file in batch}
            if any(self._evolve(columns) for columns in wanted.values()):
                return False
            info = json.dumps({"kind": "units", "run": self._run, "units": [u.name for u, _ in batch]})
            expiring = {unit_id(unit): self._now_ms() for unit, _ in batch}
            self._append([file for _, file in batch], info, {COMMITTER: self._term or 0}, expiring, report)
        except (CommitConflictError, CommitUnknownError) as error:
            logger.info("commit repeated", extra={"reason": error.message})
            return False
        self._moved = False
        report.units += len(batch)
        report.rows += sum(unit.record_count for unit, _ in batch)
        return True

    # -- the committer's own place --------------------------------------------------------------------

    def _ensure_term(self) -> None:
        """Take the committer's place with a commit of its own, before the first data."""
        self._table.refresh()
        if self._term is None:
            wanted = (self._table.txn(COMMITTER) or 0) + 1
            info = json.dumps({"kind": "committer", "run": self._run, "term": wanted})
            self._table.append("delta.claim", [], info, {COMMITTER: wanted}, {})
            self._term = wanted
            self._table.refresh()
        self._check_term()

    def _check_term(self) -> None:
        held = self._table.txn(COMMITTER)
        if held != self._term:
            self._term = None
            raise FencedError(
                "another committer took over this table", hint="It goes on alone; see `firnline staging`."
            )

    def _evolve(self, wanted: pa.Schema) -> bool:
        """Add the columns that a unit needs, before its data; True when the version moved."""
        try:
            missing = missing_fields(self._table.schema(), wanted)
        except SchemaError as error:
            raise SinkError(f"the table changed while a unit was validated: {error.message}") from error
        if missing:
            self._table.add_columns(pa.schema(missing))
        return bool(missing)

    # -- after the commit -----------------------------------------------------------------------------

    def _delete(self, units: Iterable[Unit | ForeignUnit]) -> None:
        for unit in units:
            fault_point("staging.delete.before")
            self._storage.delete(f"{PENDING}/{unit.name}{SUFFIX}")
            fault_point("staging.delete.after")
            self._known.pop(unit.name, None)

    def _reject(self, name: str, reason: str, report: CycleReport) -> None:
        reject(self._storage, name, reason, self._clock)
        self._known.pop(name, None)
        report.rejected.append((name, reason))

    def _measure(self, report: CycleReport) -> None:
        report.pending = len(self._known)
        report.pending_bytes = sum(_unit_bytes(u) for u in self._known.values())

    def _maintain(self) -> None:
        if self._since_checkpoint >= CHECKPOINT_EVERY:
            self._table.refresh()
            self._table.checkpoint()
            self._since_checkpoint = 0

    def _now_ms(self) -> int:
        return int(self._clock.now().timestamp() * 1000)


def _unit_bytes(unit: Unit | ForeignUnit) -> int:
    return unit.size_bytes if isinstance(unit, ForeignUnit) else sum(int(f["size_bytes"]) for f in unit.files)


def _widened(columns: pa.Schema, wanted: pa.Schema) -> pa.Schema:
    fields = {f.name: f for f in columns}
    for added in missing_fields(columns, wanted):
        fields[added.name] = added
    return pa.schema(list(fields.values()))
