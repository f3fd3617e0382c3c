"""Finds committed units in the log: those of other programs by their transactions, ours by their entries."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from datetime import datetime

from firnline.checkpoint.codec import short_number
from firnline.checkpoint.ledger import Fold, Ledger
from firnline.errors import DamagedError, LedgerHoleError, SinkError
from firnline.names import committed_unit
from firnline.sinks.delta.log import DeltaLog
from firnline.sinks.staged.chain import LogHead
from firnline.storage import Storage
from firnline.types import Json


class CommittedUnits:
    """The `firnline-unit:` transactions, tracked from commit to commit, as long as the log itself keeps them."""

    def __init__(self, storage: Storage) -> None:
        self._storage = storage
        self._log = DeltaLog(storage)
        self._units: dict[str, int] = {}  # unit -> lastUpdated, in ms; 0: never expires
        self._version: int | None = None

    def follow(self, version: int, expired_before: datetime | None = None) -> None:
        """Read every commit up to `version`, and drop what expired, as the log does."""
        if self._version is None:
            self._version = self._read_checkpoint()
        covered = -1  # by a checkpoint that was written since
        for number in range(self._version + 1, version + 1):
            commit = self._log.read(number)
            if commit is not None:
                self._add(commit.txns())
            elif number > covered:  # cleaned up behind us: the newest checkpoint has what it held
                covered = self._read_checkpoint()
                if covered < number:
                    raise SinkError(
                        f"commit {number} of {self._storage.root} is gone, and no Delta checkpoint holds what it held",
                        hint="Restore _delta_log from a backup: units that it committed would be committed again.",
                    )
        self._version = version
        if expired_before is not None:
            limit = expired_before.timestamp() * 1000
            self._units = {name: at for name, at in self._units.items() if not at or at >= limit}

    def __contains__(self, name: str) -> bool:
        return name in self._units

    def __len__(self) -> int:
        return len(self._units)

    def _add(self, txns: Iterable[dict[str, Json]]) -> None:
        for txn in txns:
            unit = committed_unit(str(txn["appId"]))
            if unit is not None:
                self._units[unit] = int(txn.get("lastUpdated") or 0)

    def _read_checkpoint(self) -> int:
        """Read Delta's newest checkpoint. Returns its version, -1 if there is none."""
        found = self._log.find_checkpoint()
        if found is None:
            return -1
        try:
            self._add(self._log.checkpoint_txns(found))
        except DamagedError as error:
            raise SinkError(error.message, hint="Delete it if the commits before it are still there.") from error
        return found.version


@dataclass(slots=True)
class CommittedAttempts:
    """The attempts whose epochs are in the log, from epoch `since` on; older ones are unknown."""

    since: int
    attempts: set[str] = field(default_factory=set)


def load_committed(storage: Storage, version: int, pipeline: str, log_head: LogHead, oldest: int) -> CommittedAttempts:
    """Return the committed attempts back to epoch `oldest`: from the ledger, and from the log where it is folded."""
    found = CommittedAttempts(log_head.epoch + 1)
    _from_ledger(Ledger(storage, pipeline), log_head, oldest, found)
    if found.since > oldest:
        _from_log(DeltaLog(storage), version, pipeline, oldest, found)
    return found


def _from_ledger(ledger: Ledger, log_head: LogHead, oldest: int, found: CommittedAttempts) -> None:
    candidates = ledger.candidates(log_head.epoch)
    tip = next((ref for ref, _ in candidates if short_number(ref.checksum) == log_head.entry), None)
    if tip is None:
        return  # this is not the table with the ledger, or the entry is damaged
    try:
        for link in ledger.chain(tip):
            if isinstance(link, Fold) or link.epoch < oldest:
                break
            found.attempts.add(link.checkpoint.attempt)
            found.since = link.epoch if link.previous is not None else 0
    except LedgerHoleError:
        return


def _from_log(log: DeltaLog, version: int, pipeline: str, oldest: int, found: CommittedAttempts) -> None:
    """Add the attempts in the log: every commit of epochs names its units, a commit by the pipeline itself is one
    epoch."""
    for commit in log.backwards(version):
        info = commit.find_info(pipeline)
        if info is None or "checkpoint" not in info:
            continue
        if info.get("kind") != "epoch":  # a history edit: the epochs that it superseded no longer count
            found.since = min(found.since, int(info.get("jump", {}).get("to_epoch", 0)) + 1)
            continue
        units = info.get("units") or [{"epoch": info["epoch"], "attempt": info["checkpoint"]["attempt"]}]
        if int(info["epoch"]) < found.since - 1:
            return  # a commit in between is unreadable
        found.attempts.update(str(unit["attempt"]) for unit in units)
        found.since = min(found.since, *(int(unit["epoch"]) for unit in units))
        if found.since <= oldest:
            return
