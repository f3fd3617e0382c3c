"""Tells which epochs count no more: a rollback, fresh start or restore left them behind."""

from __future__ import annotations

from firnline.checkpoint.ledger import Fold, LedgerEntry

JUMP_WORDS = {"fresh": "fresh start", "import": "state import", "repair": "ledger repair"}


def jump_word(kind: str) -> str:
    """What people call a jump: a rollback, a restore, a fresh start, a rescale, a state import, a ledger repair."""
    return JUMP_WORDS.get(kind, kind)


def leaves_behind(link: LedgerEntry | Fold, epoch: int) -> bool:
    """Whether a jump in this link of the true history left an epoch behind."""
    if isinstance(link, Fold):
        return any(int(j["jump"].get("to_epoch", -1)) < epoch < int(j["epoch"]) for j in link.jumps)
    return link.is_jump and (link.previous.epoch if link.previous else -1) < epoch < link.epoch
