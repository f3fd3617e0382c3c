"""A staged Delta table as a sink: the writer's side of a two-stage table.

Committing an epoch here means putting its unit into `_staging/pending/`; the committer makes it true in the log. The
writer's checkpoint is the newest of log and gapless pending units. Its claim, an empty Delta commit, names the
tip of the chain it adopts, so a zombie's later unit is known to be a fork.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from itertools import takewhile

import pyarrow as pa

from firnline.checkpoint.codec import short_number
from firnline.checkpoint.ledger import LedgerEntry
from firnline.checkpoint.model import Checkpoint
from firnline.errors import DamagedError, FencedError, SinkError
from firnline.faults import fault_point
from firnline.names import PENDING, pending_unit
from firnline.schema import merge, schema_from_json, schema_to_json
from firnline.sinks.base import Decided, Effect, EpochCommit, Head, RunTasks, SinkContext
from firnline.sinks.delta.options import DeltaSinkOptions
from firnline.sinks.delta.sink import DeltaSink
from firnline.sinks.staged.chain import Arranged, arrange, read_log_head
from firnline.sinks.staged.unit import Unit, drop_pending, list_units, load_pending, parse_unit
from firnline.types import EntryRef, Json, Receipt

CLAIM_TRIES = 5


class StagedDeltaSink(DeltaSink):
    """Puts units instead of committing; claims and fences are those of a single-stage table."""

    def __init__(self, options: DeltaSinkOptions, context: SinkContext) -> None:
        super().__init__(options, context)
        self._sizes: dict[str, int | None] = {}
        self._settled = 0  # the log's epoch when it was last read
        self._chain: dict[int, int] = {}  # the digests of our chain, from there on

    def load(self) -> Head:
        return self._chain_end()[0]

    def load_committed(self) -> Head:
        head = super().load_committed()
        return replace(head, committed=head.epoch)

    def _chain_end(self) -> tuple[Head, Arranged[Unit]]:
        """Return the log's head, advanced by the pending units without a gap.

        Units are listed before the log is read: a unit deleted from the folder by then is in the log.
        """
        units = [u for u in load_pending(self.storage) if isinstance(u, Unit) and u.pipeline == self._pipeline]
        head = self._read_head(ask_copies=not units) if self._table.refresh() else Head(exists=False, version=-1)
        self._settled = head.epoch
        head = replace(head, committed=head.epoch)
        if not head.exists:
            return head, Arranged()
        arranged = arrange(read_log_head(self._table, self._pipeline), units)
        if not arranged.ready:
            return head, arranged
        last = arranged.ready[-1]
        if self._context.decides:
            self._check_decides(last.checkpoint)
        # The unit has the checkpoint; a copy of the same entry only shows that the fast path would have worked.
        copy = self._context.copies.find(last.epoch, last.digest)
        path = copy[0] if copy else "sink"
        return replace(head, epoch=last.epoch, entry=last.entry, checkpoint=last.checkpoint, path=path), arranged

    def find_schema(self) -> pa.Schema | None:
        """Return the table's columns and those that pending units will add."""
        _, arranged = self._chain_end()
        found = super().find_schema()
        if found is None:
            return None
        for unit in arranged.ready:
            found = merge(found, schema_from_json(unit.schema), frozen=found.names)
        return found

    def refuse_widening(self, types: Mapping[str, pa.DataType]) -> dict[str, str]:
        return dict.fromkeys(types, "the committer of a two-stage table adds files and rewrites none")

    def _claim_tip(self) -> tuple[int, int | None]:
        """Return the end of the chain, including pending units; a committer that moves it also moves the version."""
        units = [u for u in load_pending(self.storage) if isinstance(u, Unit) and u.pipeline == self._pipeline]
        self.storage.settle(PENDING)  # the claim names the tip: a power failure must not lose that unit
        log_head = read_log_head(self._table, self._pipeline)
        ready = arrange(log_head, units).ready
        if ready and self._decided is not None:
            decided = self._decided(log_head.epoch)
            ready = list(takewhile(lambda unit: unit.digest in decided, ready))
        return (ready[-1].epoch, ready[-1].digest) if ready else super()._claim_tip()

    def make_durable(self) -> None:
        super().make_durable()
        self.storage.settle(PENDING)

    def claim(
        self,
        run: str,
        generation: int | None = None,
        baseline: EntryRef | None = None,
        onto: int | None = None,
        *,
        again: bool = False,
        decided: Decided | None = None,
    ) -> Head:
        """Claim, and read the chain again under the claim: in a deciding table it must still reach the claim's tip.

        A unit may have been set aside in between. If the run continued before it and a user retried the unit, it would
        be committed instead of the run's own.
        """
        for _ in range(CLAIM_TRIES):
            claimed = super().claim(run, generation, baseline, onto, again=again, decided=decided)
            if not claimed.exists:
                return replace(claimed, committed=0)
            head, arranged = self._chain_end()
            if generation is not None or head.epoch >= (self._table.txn(self._id("-tip-epoch")) or 0):
                self._table.make_durable()
                self._chain = {unit.epoch: unit.digest for unit in arranged.ready}
                return replace(head, generation=claimed.generation)
        raise SinkError(
            f"units of {self.name} are set aside while it is claimed", hint=f"See `firnline staging {self._table.uri}`."
        )

    def commit(self, commit: EpochCommit, run_tasks: RunTasks | None = None) -> Receipt:
        """Put the unit as the last step: it is the checkpoint and the signal.

        A repeat puts the same bytes under the same name, and writes nothing once the log has the epoch.
        """
        while not self._table.refresh():
            self._create(commit)
        if self._deferred:
            self._claim_created()
            self._table.refresh()
        self._check_claim()
        repeated = self._check_previous(commit)
        if repeated is not None:
            return repeated
        made_by = commit.checkpoint.generation
        unit = Unit(
            # An earlier run may put the same epoch late: it must not replace ours.
            name=commit.checkpoint.attempt + (f"-{self._generation}" if made_by != self._generation else ""),
            checkpoint=commit.checkpoint,
            entry=commit.entry,
            previous=commit.previous,
            previous_checkpoint=commit.previous_checkpoint,
            files=commit.files,
            schema=schema_to_json(commit.schema),
            source_state=commit.source_state if self._writes_interchange() else None,
            claimed=self._generation,
        )
        fault_point("staging.put.before")
        self.storage.put(pending_unit(unit.name), unit.to_bytes())
        self._chain[unit.epoch] = unit.digest
        fault_point("staging.put.after")
        # Another claim may have come between the check and the put: then this unit may be a fork.
        self._table.refresh()
        self._check_claim()
        return self._unit_receipt(unit)

    def _check_claim(self) -> None:
        """Check that our claim is still the newest at the version read, and that the committed chain is ours, by its
        digest."""
        fence = self._fence()
        epoch, digest, owner = fence.epoch, fence.digest, fence.generation
        if owner != self._generation:
            raise FencedError(f"generation {owner} holds {self.name}, not {self._generation}", generation=owner)
        if self._chain.get(epoch, digest) != digest:
            raise FencedError(f"epoch {epoch} of {self.name} was committed from another unit than ours", epoch=epoch)
        self._chain = {known: found for known, found in self._chain.items() if known >= epoch}
        if epoch > self._settled:
            self._table.make_durable()  # further sinks get what the committer wrote
        self._settled = epoch

    def _check_previous(self, commit: EpochCommit) -> Receipt | None:
        """Check that the commit follows our chain, in the log or pending; or that the log already has the epoch."""
        epoch, fence = commit.checkpoint.epoch, self._fence()
        if epoch <= fence.epoch:
            receipt = self.find_receipt(epoch)
            if receipt is not None and receipt.checkpoint_checksum == commit.checkpoint.checksum:
                return receipt
            raise FencedError(f"epoch {epoch} of {self.name} has another author", epoch=epoch)
        before = commit.previous.epoch if commit.previous else 0
        expected = short_number(commit.previous.checksum) if commit.previous else None
        digest = fence.digest if before == fence.epoch else self._find_pending_digest(before)
        if (digest, epoch) != (expected, before + 1):
            raise FencedError(f"{self.name} does not hold the entry before epoch {epoch}", epoch=epoch)
        return None

    def _find_pending_digest(self, epoch: int) -> int | None:
        if epoch not in self._chain:  # the answer to its put may have been lost: then only the folder has it
            _, arranged = self._chain_end()
            self._table.make_durable()
            return next((unit.digest for unit in arranged.ready if unit.epoch == epoch), None)
        return self._chain[epoch]

    def edit(self, commit: EpochCommit, effect: Effect, onto: EntryRef | None, version: int | None = None) -> Receipt:
        """Edit the table, then drop the pending units that became forks."""
        receipt = super().edit(commit, effect, onto, version)
        drop_pending(self.storage, self._pipeline, receipt.epoch)
        return receipt

    def find_receipt(self, epoch: int) -> Receipt | None:
        """Return the receipt of an epoch: its pending unit, or from the log and the ledger."""
        head, arranged = self._chain_end()
        if head.exists:
            self._table.make_durable()
        for unit in arranged.ready:
            if unit.epoch == epoch:
                self.storage.settle(PENDING)  # the caller considers the epoch staged
                return self._unit_receipt(unit)
        if not head.exists or head.epoch < epoch:
            return None
        for link in self._ledger.chain(head.entry):
            if isinstance(link, LedgerEntry) and link.epoch == epoch:
                return self._entry_receipt(link)
        raise SinkError(f"epoch {epoch} of {self.name} is committed, but its ledger entry is folded away")

    def _entry_receipt(self, entry: LedgerEntry) -> Receipt:
        files = entry.staged.get(self.name, [])
        return _receipt(self.name, entry.checkpoint, files, self._table.version)

    def _unit_receipt(self, unit: Unit) -> Receipt:
        return _receipt(self.name, unit.checkpoint, unit.files, self._table.version)

    def is_full(self) -> tuple[int, int] | None:
        """Return pending units and bytes if a limit of back-pressure is reached; None if there is room."""
        options = self._options
        if options.max_pending_units is None and options.max_pending_bytes is None:
            return None
        sizes = {}
        for name, _ in list_units(self.storage, PENDING):
            if name not in self._sizes:
                self._sizes[name] = self._unit_bytes(name)
            sizes[name] = self._sizes[name]
        self._sizes = sizes
        own = [size for size in sizes.values() if size is not None]
        over_units = options.max_pending_units is not None and len(own) >= options.max_pending_units
        over_bytes = options.max_pending_bytes is not None and sum(own) >= options.max_pending_bytes
        return (len(own), sum(own)) if over_units or over_bytes else None

    def _unit_bytes(self, name: str) -> int | None:
        """Return the data bytes of a unit of this pipeline; None for any other."""
        try:
            unit = parse_unit(name, self.storage.get(pending_unit(name)))
        except (FileNotFoundError, DamagedError):
            return None
        if not isinstance(unit, Unit) or unit.pipeline != self._pipeline:
            return None
        return sum(int(f["size_bytes"]) for f in unit.files)

    def settled_epoch(self) -> int | None:
        """Return the log's epoch: a pending unit may still be set aside, and its input read again."""
        return self._settled

    def read_settled(self) -> int | None:
        if self._table.refresh():
            self._check_claim()
        return self._settled

    def maintain(self) -> None:
        """Do nothing: the committer maintains the log."""


def _receipt(sink: str, checkpoint: Checkpoint, files: list[dict[str, Json]], version: int) -> Receipt:
    return Receipt(
        sink=sink,
        epoch=checkpoint.epoch,
        generation=checkpoint.generation,
        run=checkpoint.run,
        attempt=checkpoint.attempt,
        checkpoint_checksum=checkpoint.checksum,
        version=version,
        rows=sum(int(f["rows"]) for f in files),
        size_bytes=sum(int(f["size_bytes"]) for f in files),
    )
