"""How a run begins: reads what the sinks, the store and the tiers hold, claims its generation, joins every sink."""

from __future__ import annotations

import logging

import pyarrow as pa

from firnline.checkpoint.ledger import LedgerEntry
from firnline.engine import messages as m
from firnline.engine.flight import Base, Flight
from firnline.engine.jumps import check_new_sinks, join_sink
from firnline.engine.marking import CheckpointMaker
from firnline.engine.orders import declared
from firnline.engine.parts import Parts
from firnline.errors import CheckpointLostError, CommitConflictError, SinkError, StoreAheadError
from firnline.sinks.base import Held
from firnline.sinks.delta.adopt import find_foreign
from firnline.sinks.delta.columns import missing_fields

logger = logging.getLogger(__name__)

CLAIM_TRIES = 20


class Opening:
    """The first steps of one run; what they find goes into the flight."""

    def __init__(
        self, parts: Parts, flight: Flight, maker: CheckpointMaker, run: str, *, accept_duplicates: bool
    ) -> None:
        self._parts = parts
        self._flight = flight
        self._maker = maker
        self._run = run
        self._accept_duplicates = accept_duplicates
        self._baseline_version = -1

    def read_sinks(self) -> m.Event:
        recorder, flight = self._parts.recorder, self._flight
        recorder.look()
        held = self._parts.deciding.load()
        if held.checkpoint is None and not held.generation:  # a log that knows our claim knows what it lacks
            self._check_no_history()
        held = recorder.confirm(held, self._parts.deciding.load)
        if held.exists and held.checkpoint is None:
            flight.baseline = self._find_baseline(held.version)
        self._set_tip(held)
        tip = flight.baseline.checkpoint.attempt if flight.baseline else held.attempt
        epochs = {self._parts.deciding.name: held.epoch}
        for sink in self._parts.sinks[1:]:
            try:
                epochs[sink.name] = sink.load().epoch
            except SinkError as error:  # left out: it counts as lagging until it can be joined
                logger.warning("sink could not be read", extra={"sink": sink.name, "reason": error.message})
        check_new_sinks(self._parts, held.entry, epochs)
        unknown = held.checkpoint is None and flight.baseline is None
        if unknown:
            self._check_others_know_nothing(epochs)
        recorded = recorder.begin(held)
        if unknown:
            logger.warning("no sink, store or tier knows this pipeline", extra={"pipeline": self._parts.options.name})
        return m.SinksRead(tip, tuple(epochs.items()), recorded=recorded)

    def _check_no_history(self) -> None:
        """Without a table there may be epochs that were staged and never committed, but no more than fly at once."""
        staged = self._parts.ledger.newest_epoch()
        if staged > self._parts.options.batch.max_inflight:
            root = self._parts.storage.root
            raise CheckpointLostError(
                f"the ledger knows epoch {staged}, but {root} is no table any more",
                hint=f"Restore {root}/_delta_log from a backup; to start over, move the whole folder away.",
                epoch=staged,
            )

    def _find_baseline(self, version: int) -> LedgerEntry | None:
        """Another tool's progress in this table's log, as the entry that the first claim will name."""
        self._baseline_version = version
        found = find_foreign(
            self._parts.storage,
            version,
            self._parts.options.checkpoint.recovery_scan_commits,
            accept_older=self._accept_duplicates,
        )
        if found is None:
            return None
        position, records = self._parts.source.adopt(found)
        name = self._parts.source.name
        checkpoint = self._maker.make(0, self._parts.ids.new(), 0, {name: position}, None, None)
        return LedgerEntry(checkpoint, None, {name: records}, kind="baseline")

    def _check_others_know_nothing(self, epochs: dict[str, int]) -> None:
        """A further sink that holds epochs of which the deciding one knows nothing would never be given them again."""
        ahead = {name: epoch for name, epoch in epochs.items() if epoch}
        if ahead and self._parts.deciding.load().checkpoint is None:  # else another run began in between
            name, epoch = ahead.popitem()
            raise StoreAheadError(
                f"sink {name!r} holds epoch {epoch}, but {self._parts.storage.root}, which decides, knows nothing",
                epoch=epoch,
            )

    def claim(self) -> m.Event:
        sink, recorder = self._parts.deciding, self._parts.recorder
        recorder.before_claim(sink.load)
        held = self._claim_onto_baseline() if self._flight.baseline else sink.claim(self._run)
        recorder.claimed(held, self._run)
        self._flight.generation = held.generation
        self._set_tip(held)
        if sink.settled_epoch() is not None:
            self._maker.note_committed(sink.load_committed())
        if held.exists:
            missing_fields(sink.find_schema() or pa.schema([]), declared(self._parts.options.source))
        return m.Claimed(held.epoch, held.attempt)

    def _claim_onto_baseline(self) -> Held:
        """Claim onto the very version that the other tool's progress was read from; if it moved on, read it again."""
        for _ in range(CLAIM_TRIES):
            assert self._flight.baseline is not None
            ref = self._parts.ledger.stage(self._flight.baseline)
            try:
                return self._parts.deciding.claim(self._run, baseline=ref, onto=self._baseline_version)
            except CommitConflictError:
                self._flight.baseline = self._find_baseline(self._parts.deciding.load().version)
        raise SinkError("the other tool commits all the time; stop it before Firnline takes over")

    def join(self, name: str) -> m.Event:
        tip, generation = self._flight.held.entry, self._flight.generation
        sink = self._parts.sink(name)
        return m.Joined(name, join_sink(self._parts, sink, self._run, generation, tip, tip))

    def _set_tip(self, held: Held) -> None:
        """Take what the deciding sink holds as the base of the next plan."""
        flight = self._flight
        flight.held = held
        self._maker.begin(held)
        checkpoint = held.checkpoint or (flight.baseline.checkpoint if flight.baseline else None)
        stored = checkpoint.positions.get(self._parts.source.name) if checkpoint else None
        flight.bases[checkpoint.attempt if checkpoint else ""] = Base(
            epoch=held.epoch,
            entry=held.entry,
            checkpoint=checkpoint,
            position=self._parts.source.start(stored),
            schema=self._parts.deciding.find_schema() if held.exists else None,
        )
