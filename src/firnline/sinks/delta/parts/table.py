"""The table of one part: a Delta table that only some epochs of its sink touch.

Its commits are those of any Delta sink. The fence differs: a commit requires the entry that last touched this part, not
the one before, and its own generation or an older one. Every commit names the sink.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from dataclasses import replace

from firnline.checkpoint.codec import short_number
from firnline.errors import FencedError, RollbackRefusedError, SinkDivergedError, SinkWentBackError, TableLostError
from firnline.names import txn_owner
from firnline.schema import wider_columns
from firnline.sinks.base import Effect, EpochCommit, KeepRows, RestoreVersion, RunTasks, SinkContext
from firnline.sinks.delta.history_edit import TableHistory, read_epoch_versions
from firnline.sinks.delta.options import DeltaSinkOptions
from firnline.sinks.delta.parts.state import NOTHING, Held, Part, judge
from firnline.sinks.delta.sink import CONFLICT_TRIES, DeltaSink
from firnline.sinks.delta.stage import CHANGES
from firnline.sinks.delta.upsert.sink import UpsertSink
from firnline.stores.tiers import Tiers
from firnline.topology.decide import find_part_end
from firnline.types import EntryRef, Json, Receipt

NAME_BYTES = 200  # of a folder; most file systems take 255
_REFUSED = '%?#*:"<>|{}'  # characters that URIs, globs or file systems give a meaning of their own


def refuse_name(name: str) -> str:
    """Return why a table cannot have this name below the root of its sink; empty if it can."""
    for segment in name.split("/"):
        if not segment or segment[0] in "_. " or segment[-1] in ". ":
            return f"table {name!r}: a folder may not begin or end like that"
        if any(character in _REFUSED for character in segment):
            return f"table {name!r} has a character that no folder should have"
        if len(segment.encode()) > NAME_BYTES:
            return f"table {name[:NAME_BYTES]!r}... has a name of more than {NAME_BYTES} bytes"
    return ""


class PartTable(DeltaSink):
    """The table of a part that rows are appended to."""

    def __init__(self, options: DeltaSinkOptions, context: SinkContext, owner: str) -> None:
        super().__init__(options, replace(context, decides=False, copies=Tiers(), outbox=None))
        self._deciding = False
        self._owner = owner  # the name by which the target knows the sink
        self._part = Part(0)
        self._replaces = False

    def begin(self, run: str, generation: int, part: Part, *, replaces: bool = False) -> None:
        """Prepare for a commit: by whom it is made, what the sink knows of the part, and whether all rows go."""
        self._run, self._generation, self._part, self._replaces = run, generation, part, replaces
        self._deferred = True  # whoever creates the table: the fence decides

    def find_held(self) -> Held:
        """Read what the table holds of the sink; nothing if there is no table. It may be another one than before."""
        return self._held() if self._table.reopen() else NOTHING

    def _held(self) -> Held:
        """Return what the table holds at the version that was read."""
        fence = self._fence()
        return Held(fence.epoch, fence.digest or 0)

    def find_owner(self) -> str:
        """Return who else writes to the table: a sink of this pipeline, or another pipeline; empty if nobody does.

        Read once, before the first commit of this sink there.
        """
        if not self._table.refresh():
            return ""
        for commit in self._log.backwards(self._table.version, CONFLICT_TRIES):
            info = commit.find_info(self._pipeline)
            if info is not None and "kind" in info:
                sink = info.get("sink")
                return "" if sink == self._owner else f"sink {sink!r}" if sink else "another sink of this pipeline"
            others = {owner for txn in commit.txns() if (owner := txn_owner(str(txn["appId"]))) is not None}
            if others - {self._pipeline}:
                return f"pipeline {min(others - {self._pipeline})!r}"
        return "another sink of this pipeline" if self._table.txn(self._id("")) is not None else ""

    # -- commit ---------------------------------------------------------------------------------------

    def commit(self, commit: EpochCommit, run_tasks: RunTasks | None = None) -> Receipt:
        try:
            return super().commit(commit, run_tasks)
        except TableLostError as error:
            raise self.went_back() from error

    def _check_fence(self, commit: EpochCommit) -> Receipt | None:
        entry = entry_of(commit)
        verdict = judge(self._part, self._held(), entry)
        if verdict == "has":
            receipt = self.find_receipt(entry.epoch)
            if receipt is not None and receipt.checkpoint_checksum == commit.checkpoint.checksum:
                return receipt
        owner = self._fence().generation
        if owner > self._generation:
            raise FencedError(f"generation {owner} holds {self.uri}, not {self._generation}", generation=owner)
        if verdict == "went back":
            raise self.went_back()
        if verdict != "write":
            raise self._diverged()
        return None

    def _append(self, commit: EpochCommit, onto: int, run_tasks: RunTasks | None) -> int:
        if not self._replaces:
            return super()._append(commit, onto, run_tasks)
        txns, expiring = self._transactions(commit, onto)
        info, types = self._commit_info(commit, onto), wider_columns(self._table.schema(), commit.schema)
        if types:
            return self._table.replace_all("delta.commit", types, commit.files, info, txns, expiring, onto=onto)
        return self._table.append("delta.commit", commit.files, info, txns, expiring, onto=onto, replace=True)

    def _create(self, commit: EpochCommit) -> None:
        if self._part.held.epoch:
            raise self.went_back()
        super()._create(replace(commit, previous=None))

    def _claim_created(self) -> None:
        self._table_id, self._deferred = self._table.id, False

    def _info(self, kind: str, **fields: Json) -> str:
        return super()._info(kind, sink=self._owner, **fields)

    def went_back(self) -> SinkWentBackError:
        """Return the error for a table that lost what it held."""
        return SinkWentBackError(
            f"{self.uri}, a part of sink {self.name!r}, lost epoch {self._part.held.epoch}", sink=self.name
        )

    def _diverged(self) -> SinkDivergedError:
        held = self._held()
        return SinkDivergedError(
            f"{self.uri}, a part of sink {self.name!r}, holds an epoch {held.epoch} that was never decided for it",
            hint="Bring the table back from a backup, or move it away: what it held is delivered again.",
            sink=self.name,
            epoch=held.epoch,
        )

    def delete_changes(self, files: Sequence[dict[str, Json]]) -> None:
        """Delete the change rows of a commit that was made: a later delivery would stage them again."""
        for file in files:
            if file.get("kind") == CHANGES:
                with contextlib.suppress(OSError):  # a sweep deletes what stays
                    self.storage.delete(str(file["path"]))

    # -- history edits --------------------------------------------------------------------------------

    def apply_edit(self, commit: EpochCommit, effect: Effect) -> None:
        """Apply a history edit, unless the table has it. `effect` is for the sink: a version there is an epoch."""
        if judge(self._part, self.find_held(), entry_of(commit)) == "has":
            return
        self.claim(self._run, self._generation)  # from here on no older run changes the table
        found = self.find_held()
        if found.epoch < self._part.held.epoch:
            raise self.went_back()
        if found != self._part.held and not self._part.held.epoch < found.epoch <= self._part.open:
            raise self._diverged()
        self._deferred = False
        self.edit(commit, self.effect_here(effect, found), ref_of(found))

    def effect_here(self, effect: Effect, found: Held) -> Effect:
        """Return what an effect of the sink is for this table, which holds `found`.

        Raises:
            RollbackRefusedError: the log no longer has the version.
        """
        if not isinstance(effect, RestoreVersion):
            return effect if found.epoch or isinstance(effect, KeepRows) else KeepRows()
        if found.epoch <= effect.version:
            return KeepRows()
        return RestoreVersion(self._version_at(effect.version))

    def version_of(self, epoch: int) -> int:
        """Return the version of the table as it was when the sink held an epoch; -1: there is no table.

        The caller has read the head of the sink before: it holds the epoch.
        """
        if not self._table.reopen():
            return -1
        return self._table.version if self._held().epoch <= epoch else self._version_at(epoch)

    def _version_at(self, epoch: int) -> int:
        """Return the version of the table as it was when the sink held an epoch; before its birth, without its rows."""
        versions = read_epoch_versions(self._log, self._pipeline, self._table.version, epoch).versions
        held = find_part_end(epoch, epoch, versions)
        if held:
            return versions[held]
        first = min(versions, default=0)
        if versions and versions[first] > 0 and self._begins_with(versions[first], epoch):
            return versions[first] - 1
        raise RollbackRefusedError(
            f"{self.name}: the log of {self.uri} no longer says what it held at epoch {epoch}",
            hint="The log's retention (delta.logRetentionDuration) has passed.",
            epoch=epoch,
        )

    def _begins_with(self, version: int, epoch: int) -> bool:
        """Return whether a version is the first one after an epoch: it names the entry before it in this table."""
        commit = self._log.read(version)
        info = commit.find_info(self._pipeline) if commit is not None else None
        if info is None or info.get("kind") != "epoch":
            return False
        before = info.get("previous")
        return before is None or int(before["epoch"]) <= epoch

    @property
    def history(self) -> TableHistory:
        """The versions of the table."""
        return self._history


class PartUpsertTable(PartTable, UpsertSink):
    """The table of a part whose rows are changed by key."""

    def _check_table_key(self, key: Sequence[str], whose: str) -> None:
        if not self._part.table:  # the head of the sink has the key of a captured table, and knows where it changed
            super()._check_table_key(key, whose)


def ref_of(held: Held) -> EntryRef | None:
    """Return a reference to the entry that a part holds: by epoch and number, which is all that a fence compares."""
    return EntryRef(held.epoch, "", f"{held.entry << 1:016x}") if held.epoch else None


def entry_of(commit: EpochCommit) -> Held:
    """Return what a part holds once it has this commit."""
    return Held(commit.checkpoint.epoch, short_number(commit.entry.checksum))
