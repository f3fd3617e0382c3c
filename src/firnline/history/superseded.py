"""Which epochs a rollback, fresh start or restore has superseded, and the names of history edits."""

from __future__ import annotations

from firnline.checkpoint.ledger import Fold, LedgerEntry

EDIT_NAMES = {"fresh": "fresh start", "import": "state import", "repair": "ledger repair"}


def edit_name(kind: str) -> str:
    """Return the name of a history edit: rollback, restore, fresh start, rescale, state import, ledger repair."""
    return EDIT_NAMES.get(kind, kind)


def supersedes(link: LedgerEntry | Fold, epoch: int) -> bool:
    """Return whether the history edit in this link of the true history superseded an epoch."""
    if isinstance(link, Fold):
        return any(int(j["jump"].get("to_epoch", -1)) < epoch < int(j["epoch"]) for j in link.jumps)
    return link.is_jump and (link.previous.epoch if link.previous else -1) < epoch < link.epoch
