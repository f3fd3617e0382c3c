"""Drops units from an epoch on: their writer begins a new generation before it and reads that input again."""

from __future__ import annotations

import json
from dataclasses import dataclass

from firnline.errors import CommitConflictError, CommitUnknownError, ConfigError, SinkError
from firnline.sinks.delta.table import Table
from firnline.staging.chain import arrange
from firnline.staging.rejected import load_rejected
from firnline.staging.sink import load_pending
from firnline.staging.standing import read_standing
from firnline.staging.unit import PENDING, REJECTED, SUFFIX, Unit
from firnline.storage import Storage

TRIES = 20


@dataclass(frozen=True, slots=True)
class Discard:
    """What a discard drops, and where the writer goes on."""

    pipeline: str
    pending: list[str]
    rejected: list[str]
    resumes_after_epoch: int


@dataclass(frozen=True, slots=True)
class _Look:
    """What was found in one look at the log and the folder: a claim must name the tip of that very look."""

    discard: Discard
    version: int
    generation: int
    tip: int | None


def plan_discard(table: Table, storage: Storage, pipeline: str, epoch: int) -> Discard:
    """Say what `discard` would do; ConfigError when the epoch is committed already."""
    return _look(table, storage, pipeline, epoch).discard


def _look(table: Table, storage: Storage, pipeline: str, epoch: int) -> _Look:
    if not table.refresh():
        raise SinkError(f"there is no table at {table.uri}")
    version, standing = table.version, read_standing(table, pipeline)
    if epoch <= standing.epoch:
        raise ConfigError(
            f"epoch {epoch} of {pipeline!r} is committed; units can be discarded from epoch {standing.epoch + 1} on"
        )
    units = [u for u in load_pending(storage) if isinstance(u, Unit) and u.pipeline == pipeline]
    kept = [u for u in arrange(standing, units).ready if u.epoch < epoch]
    aside = [u.name for u in load_rejected(storage) if u.pipeline == pipeline and (u.epoch or 0) >= epoch]
    dropped = [u.name for u in units if u.epoch >= epoch]
    found = Discard(pipeline, dropped, aside, kept[-1].epoch if kept else standing.epoch)
    return _Look(found, version, standing.generation, kept[-1].digest if kept else standing.entry)


def discard(table: Table, storage: Storage, pipeline: str, epoch: int, run: str) -> Discard:
    """Fence the writer by a claim whose tip lies before the epoch, then delete the units.

    The claim comes first: from then on those units are forks, so a crash in between leaves nothing to commit.
    """
    for _ in range(TRIES):
        look = _look(table, storage, pipeline, epoch)
        found, generation = look.discard, look.generation + 1
        facts = {"kind": "claim", "pipeline": pipeline, "run": run, "generation": generation, "discard": epoch}
        txns = {
            f"firnline-gen:{pipeline}": generation,
            f"firnline-tip-epoch:{pipeline}": found.resumes_after_epoch,
            f"firnline-tip:{pipeline}": look.tip or 0,
        }
        try:
            table.append("delta.claim", [], json.dumps(facts), txns, {}, onto=look.version)
        except (CommitConflictError, CommitUnknownError):
            continue
        for name in found.pending:
            storage.delete(f"{PENDING}/{name}{SUFFIX}")
        for name in found.rejected:
            storage.delete(f"{REJECTED}/{name}{SUFFIX}")
        return found
    raise SinkError(f"cannot claim {table.uri}: other writers commit all the time")


def drop_pending(storage: Storage, pipeline: str, up_to: int) -> list[str]:
    """Delete the pending units of a pipeline up to an epoch, once a commit of that epoch has made them forks."""
    units = [u for u in load_pending(storage) if isinstance(u, Unit) and u.pipeline == pipeline and u.epoch <= up_to]
    for unit in units:
        storage.delete(f"{PENDING}/{unit.name}{SUFFIX}")
    return [unit.name for unit in units]
