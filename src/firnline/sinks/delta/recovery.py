"""Finds the checkpoint of the epoch that a table holds, from whichever copy is intact.

The snapshot tells the epoch and 63 bits of its ledger entry's checksum; both never expire. Three copies
describe the epoch: the ledger entry, the commit's own commitInfo, and, in part, the interchange payload.
1. The ledger entry with that checksum. No scan of the log is needed.
2. The commitInfo of the commit, found by a scan backwards.
3. The checkpoint of the epoch before, advanced by the inputs of this epoch's entry, whose part is intact.
If nothing intact tells the epoch: an error and the way out, never a fresh start.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TypeAlias

from firnline.checkpoint.codec import parse, short_number, unseal
from firnline.checkpoint.ledger import Ledger, LedgerEntry
from firnline.checkpoint.model import Checkpoint
from firnline.errors import CheckpointLostError, DamagedError
from firnline.sinks.delta.log import DeltaLog
from firnline.types import EntryRef, Json

# Positions and a ledger entry's inputs, both per source -> positions after that epoch.
Replay: TypeAlias = Callable[[dict[str, Json], dict[str, list[dict[str, Json]]]], dict[str, Json]]


@dataclass(frozen=True, slots=True)
class Found:
    """The checkpoint, the entry that the commit names, and what had to be repaired on the way."""

    checkpoint: Checkpoint
    entry: EntryRef
    repairs: tuple[str, ...] = ()


def find_checkpoint(
    log: DeltaLog, ledger: Ledger, pipeline: str, version: int, epoch: int, digest: int | None, replay: Replay
) -> Found:
    """The checkpoint of `epoch`, which the table at `version` holds.

    Raises:
        CheckpointLostError: no copy is intact.
    """
    candidates = ledger.candidates(epoch)
    for ref, data in candidates:
        if short_number(ref.checksum) == digest:
            entry = LedgerEntry.from_bytes(data, f"ledger entry {ref.name}")
            return Found(entry.checkpoint, ref)
    repairs = [f"ledger entry of epoch {epoch}: missing or damaged"]
    named, info_checkpoint = _from_commit_info(log, pipeline, version, epoch)
    if info_checkpoint is not None and named is not None:
        return Found(info_checkpoint, named, tuple(repairs))
    repairs.append(f"commitInfo of epoch {epoch}: missing or damaged")
    rebuilt = _rebuild(log, ledger, pipeline, version, candidates, digest, replay)
    if rebuilt is not None:
        return replace(rebuilt, repairs=tuple(repairs))
    raise CheckpointLostError(
        f"the table holds epoch {epoch} of {pipeline!r}, but no intact copy of its checkpoint is left",
        epoch=epoch,
        tried=repairs,
    )


def _from_commit_info(
    log: DeltaLog, pipeline: str, version: int, epoch: int
) -> tuple[EntryRef | None, Checkpoint | None]:
    """The copy in the log: without limit, since the transaction proves that the commit exists."""
    for commit in log.backwards(version):
        try:
            info = commit.info(pipeline)
        except DamagedError:
            continue
        if info is None or info.get("epoch") != epoch:
            continue
        if info.get("delta_version") != commit.version - 1:
            return None, None  # a commit that says it was made onto another version is not to be trusted
        try:
            return EntryRef.from_json(info["entry"]), Checkpoint.from_json(
                info["checkpoint"], f"commit {commit.version}"
            )
        except (DamagedError, KeyError, TypeError, ValueError):
            return None, None
    return None, None


def _rebuild(
    log: DeltaLog,
    ledger: Ledger,
    pipeline: str,
    version: int,
    candidates: list[tuple[EntryRef, bytes]],
    digest: int | None,
    replay: Replay,
) -> Found | None:
    """Checkpoint n from checkpoint n-1 and what is left of entry n; only when one attempt was ever staged for it."""
    if len(candidates) != 1 or digest is None:
        return None
    ref, data = candidates[0]
    what = f"ledger entry {ref.name}"
    try:
        body = parse(data, what)
        inputs = unseal(body["inputs"], what)["sources"]
        previous = EntryRef.from_json(body["previous"]) if body["previous"] else None
        damaged = body["checkpoint"]
        before = _checkpoint_before(log, ledger, pipeline, version, previous)
        if before is None:
            return None
        after = replace(
            before,
            epoch=ref.epoch,
            attempt=ref.name.removesuffix(".json").partition("-")[2],
            generation=int(damaged["generation"]),
            positions=replay(before.positions, inputs),
        )
    except (DamagedError, KeyError, TypeError, ValueError):
        return None
    # Of the true checksum only what the snapshot holds is known: enough for the fence, a hole for the chain.
    return Found(after, replace(ref, checksum=f"{digest << 1:016x}"))


def _checkpoint_before(
    log: DeltaLog, ledger: Ledger, pipeline: str, version: int, previous: EntryRef | None
) -> Checkpoint | None:
    if previous is None:
        return None
    for ref, data in ledger.candidates(previous.epoch):
        if ref.checksum == previous.checksum:
            return LedgerEntry.from_bytes(data, f"ledger entry {ref.name}").checkpoint
    return _from_commit_info(log, pipeline, version, previous.epoch)[1]
