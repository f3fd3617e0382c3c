"""Drops units from an epoch on: their writer begins a new generation before it and reads that input again.

No other sink may hold an epoch that is dropped from the deciding table. A run gives further sinks only epochs in that
table's log, so units that name the deciding sink are safe to drop. Units of older versions do not name it. They are
dropped only if the tables of the further sinks are known and hold no epoch from there on. Units that are dropped from a
further sink's table are put again by the next run.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass

from firnline.checkpoint.ledger import Ledger
from firnline.errors import CommitConflictError, CommitUnknownError, ConfigError, SinkError
from firnline.names import generation_txn, pending_unit, set_aside_unit, tip_epoch_txn, tip_txn
from firnline.sinks.delta.log import DeltaLog
from firnline.sinks.delta.table import Table
from firnline.sinks.staged.chain import arrange, read_log_head
from firnline.sinks.staged.unit import Unit, load_pending, load_rejected
from firnline.storage import Storage

TRIES = 20
CLAIMS_READ = 1000  # commits that are read back to the newest claim

Further = Mapping[str, tuple[Table, Storage]]


@dataclass(frozen=True, slots=True)
class Discard:
    """The units that a discard drops, and where the writer continues."""

    pipeline: str
    pending: list[str]
    rejected: list[str]
    resumes_after_epoch: int


@dataclass(frozen=True, slots=True)
class _Current:
    """One read of the log and the folder: a claim must name the tip of exactly this read."""

    discard: Discard
    version: int
    generation: int
    tip: int | None


def plan_discard(table: Table, storage: Storage, pipeline: str, epoch: int, further: Further | None = None) -> Discard:
    """Return what `discard` would do. Raises the same errors."""
    return _read_current(table, storage, pipeline, epoch, further).discard


def _read_current(table: Table, storage: Storage, pipeline: str, epoch: int, further: Further | None) -> _Current:
    if not table.refresh():
        raise SinkError(f"there is no table at {table.uri}")
    version, log_head = table.version, read_log_head(table, pipeline)
    if epoch <= log_head.epoch:
        raise ConfigError(
            f"epoch {epoch} of {pipeline!r} is committed; units can be discarded from epoch {log_head.epoch + 1} on"
        )
    units = _units_of(storage, pipeline)
    _check_further(Ledger(storage, pipeline), pipeline, [u for u in units if u.epoch >= epoch], epoch, further)
    kept = [u for u in arrange(log_head, units).ready if u.epoch < epoch]
    aside = [u.name for u in load_rejected(storage) if u.pipeline == pipeline and (u.epoch or 0) >= epoch]
    dropped = [u.name for u in units if u.epoch >= epoch]
    found = Discard(pipeline, dropped, aside, kept[-1].epoch if kept else log_head.epoch)
    generation = _next_generation(DeltaLog(storage), version, pipeline, log_head.generation)
    return _Current(found, version, generation, kept[-1].digest if kept else log_head.entry)


def _units_of(storage: Storage, pipeline: str) -> list[Unit]:
    return [u for u in load_pending(storage) if isinstance(u, Unit) and u.pipeline == pipeline]


def _next_generation(log: DeltaLog, version: int, pipeline: str, generation: int) -> int:
    """Return a new generation, or the current one right after another discard, which has fenced every writer.

    A further sink's table is therefore never more than one generation ahead of the deciding one, whose next claim is
    that.
    """
    for commit in log.backwards(version, CLAIMS_READ):
        info = commit.find_info(pipeline)
        if info is not None and info.get("kind") in ("claim", "create"):
            return generation if "discard" in info else generation + 1
    return generation + 1


def _check_further(ledger: Ledger, pipeline: str, dropped: list[Unit], epoch: int, further: Further | None) -> None:
    """Refuse to drop epochs from the deciding table that another sink may hold.

    Raises:
        ConfigError: it names the sink, and what to do instead.
    """
    if further is None:
        old = next((unit for unit in dropped if not unit.checkpoint.deciding), None)
        names = sorted(ledger.load(old.entry).staged) if old is not None and ledger.newest_epoch() else []
        if len(names) > 1:
            raise ConfigError(
                f"an older version put epoch {epoch} for the sinks {', '.join(names)}, and others may hold it already",
                hint="Name the spec instead of the table, so that the other tables are looked at: "
                f"firnline staging SPEC --discard-from {epoch}",
            )
        return
    for name, (table, storage) in further.items():
        if not table.refresh():
            continue
        log_head = read_log_head(table, pipeline)
        ready = arrange(log_head, _units_of(storage, pipeline)).ready
        holds = ready[-1].epoch if ready else log_head.epoch
        if holds >= epoch:
            raise ConfigError(
                f"sink {name!r} holds epoch {holds} already: without its units here, it would hold what was never true",
                hint="Commit them with `firnline committer`; what stops them is shown by `firnline staging`.",
            )


def discard(
    table: Table, storage: Storage, pipeline: str, epoch: int, run: str, further: Further | None = None
) -> Discard:
    """Fence the writer with a claim whose tip is before the epoch, then delete the units.

    The claim comes first: from then on those units are forks, so a crash in between leaves nothing to commit. `further`
    are the tables of the other sinks, by name, if this one decides and they are known.

    Raises:
        ConfigError: the epoch is already committed, or another sink holds it or may hold it.
    """
    for _ in range(TRIES):
        current = _read_current(table, storage, pipeline, epoch, further)
        found, generation = current.discard, current.generation
        facts = {"kind": "claim", "pipeline": pipeline, "run": run, "generation": generation, "discard": epoch}
        txns = {
            generation_txn(pipeline): generation,
            tip_epoch_txn(pipeline): found.resumes_after_epoch,
            tip_txn(pipeline): current.tip or 0,
        }
        try:
            table.append("delta.claim", [], json.dumps(facts), txns, {}, onto=current.version)
        except (CommitConflictError, CommitUnknownError):
            continue
        for name in found.pending:
            storage.delete(pending_unit(name))
        for name in found.rejected:
            storage.delete(set_aside_unit(name))
        return found
    raise SinkError(f"cannot claim {table.uri}: gave up after {TRIES} conflicts with other writers")
