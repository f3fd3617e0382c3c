"""Keeps ledgers small: folds old entries, deletes entries that no commit names, and quarantine that no entry names."""

from __future__ import annotations

from dataclasses import dataclass, field

from firnline.checkpoint.ledger import Ledger
from firnline.errors import DamagedError, SinkError
from firnline.maintenance.survey import TableFile
from firnline.names import entry_txn, epoch_txn
from firnline.sinks.delta.log import DeltaLog
from firnline.sinks.delta.recovery import Found, find_checkpoint
from firnline.sinks.delta.table import Table
from firnline.storage import Storage
from firnline.types import Json


@dataclass(slots=True)
class LedgerState:
    """One pipeline's ledger according to the log."""

    ledger: Ledger
    found: Found
    floor: int


@dataclass(slots=True)
class Upkeep:
    """What was done, or would be."""

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


def fold(state: LedgerState) -> Upkeep:
    """Fold and sweep below the floor."""
    entry = state.found.entry
    return Upkeep(state.ledger.fold(entry, state.floor), state.ledger.sweep(state.floor, entry))


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
        done = fold(state) if may_fold else Upkeep()
    except FileNotFoundError as error:
        raise SinkError(f"the ledger of {pipeline!r} moved while it was read: {error}") from error
    done.quarantine = doomed
    return done


def _refuse(_positions: dict[str, Json], _inputs: dict[str, list[dict[str, Json]]]) -> dict[str, Json]:
    raise DamagedError("only a run can rebuild a checkpoint from its inputs")
