"""Starts a pipeline over, for one named epoch: the only way to begin again over existing history.

The fresh start is an epoch of its own whose ledger chain has no predecessor: every input file is unknown again.
It works only while the table holds exactly the epoch that was named, so that a supervisor's restart with the same
command line finds it done and goes on.
"""

from __future__ import annotations

from dataclasses import dataclass

from firnline.checkpoint.ledger import Fold, LedgerEntry
from firnline.checkpoint.model import Checkpoint
from firnline.errors import LedgerHoleError, RollbackRefusedError
from firnline.history.auditing import on_record
from firnline.run.edit_entries import jump_checkpoint
from firnline.run.joining import perform_jump
from firnline.run.open_pipeline import Parts
from firnline.schema import schema_to_json
from firnline.sinks.base import Held
from firnline.types import EntryRef, Json


@dataclass(frozen=True, slots=True)
class FreshStart:
    """What became of it: the epoch that is the fresh start, made now or found done."""

    epoch: int
    after_epoch: int
    truncated: bool
    already: bool = False


def start_over(parts: Parts, after_epoch: int, run: str, *, truncate: bool = False) -> FreshStart:
    """Begin again after `after_epoch`; rows stay, or go in the same commit with `truncate`.

    Raises:
        RollbackRefusedError: the table does not hold exactly that epoch, and was not started over after it.
        FencedError: another run took over meanwhile.
    """
    found = _find_done(parts, after_epoch) or _check(parts, after_epoch)
    if isinstance(found, FreshStart):
        return found

    def look(generation: int) -> tuple[LedgerEntry, Held]:
        newest = _check(parts, after_epoch)
        committed = parts.deciding.load_committed()
        return _entry(parts, newest, committed.entry, generation, run, truncate=truncate), committed

    with on_record(parts, "fresh-start", run, from_epoch=after_epoch, to_epoch=None, truncate=truncate):
        receipt = perform_jump(parts, run, look)
    return FreshStart(receipt.epoch, after_epoch, truncate)


def _check(parts: Parts, after_epoch: int) -> Held:
    """What the table holds, if it is exactly the epoch that was named."""
    newest = parts.deciding.load()
    if newest.checkpoint is None:
        raise RollbackRefusedError(
            "there is no history to start over", hint="Run without --fresh-after; a first run starts fresh."
        )
    if newest.epoch != after_epoch:
        raise RollbackRefusedError(
            f"the table holds epoch {newest.epoch}, not {after_epoch}",
            hint=f"If it is this history that shall be left behind: --fresh-after {newest.epoch}",
            epoch=newest.epoch,
        )
    return newest


def _find_done(parts: Parts, after_epoch: int) -> FreshStart | None:
    """The fresh start after that epoch, if the true history has it."""
    jumps: list[dict[str, Json]] = []
    try:
        for link in parts.ledger.chain(parts.deciding.load().entry):
            if isinstance(link, Fold):
                jumps += link.jumps
            elif link.is_jump:
                jumps.append({"epoch": link.epoch, "kind": link.kind, "jump": link.jump})
    except LedgerHoleError:
        pass  # what lies behind a hole is not known
    for found in jumps:
        if found["kind"] == "fresh" and found["jump"]["after_epoch"] == after_epoch:
            return FreshStart(int(found["epoch"]), after_epoch, bool(found["jump"]["truncate"]), already=True)
    return None


def _entry(
    parts: Parts, newest: Held, onto: EntryRef | None, generation: int, run: str, *, truncate: bool
) -> LedgerEntry:
    held = newest.checkpoint
    assert held is not None
    base = Checkpoint(
        pipeline=parts.options.name,
        epoch=0,
        generation=0,
        run="",
        attempt="",
        created_at="",
        positions=parts.sources.start({}),
        schema_fingerprint=held.schema_fingerprint,
        schema_version=held.schema_version,
    )
    epoch = newest.epoch + 1
    return LedgerEntry(
        checkpoint=jump_checkpoint(parts, base, held, epoch=epoch, generation=generation, run=run),
        previous=None,
        inputs={},
        schema=schema_to_json(parts.deciding.table.schema()),
        kind="fresh",
        onto=onto,
        jump={"after_epoch": newest.epoch, "truncate": truncate},
    )
