"""Starts a run: reads the heads of sinks, store and tiers, claims its generation, joins every sink."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Mapping
from functools import partial

import pyarrow as pa

from firnline.checkpoint.ledger import Ledger, LedgerEntry
from firnline.epoch import messages as m
from firnline.errors import (
    CheckpointLostError,
    CommitConflictError,
    ConfigError,
    DecidingSinkError,
    FirnlineError,
    LedgerHoleError,
    OutboxDamagedError,
    SinkDivergedError,
    SinkError,
    StoreAheadError,
)
from firnline.graph import decided_input, find_source, operator_ports, sink_input
from firnline.names import GENERATION_LEAP
from firnline.options import PipelineOptions
from firnline.run.commits import staged_for
from firnline.run.fill import check_new, decide_fills
from firnline.run.followers import begins_now, join
from firnline.run.joining import ahead_of, prove_on_chain
from firnline.run.new_tables import ask_for_rows, find_new_tables, first_entry
from firnline.run.outbox import count_spare
from firnline.run.progress import Base
from firnline.run.rerun import Rerun
from firnline.run.restore_state import check_operators, known_watermarks
from firnline.run.steps import RunContext
from firnline.run.topology import check_hold
from firnline.sinks.base import Head, Sink
from firnline.sinks.known import check_known, find_away, find_filling, find_new, known_sinks
from firnline.sources.columns import columns_from_json, declared
from firnline.types import Json

logger = logging.getLogger(__name__)

CLAIM_TRIES = 20
RECOVER_HINT = "If the journal is lost, rebuild it from a sink: firnline recover --from SINK"
LAGGING = (SinkError, SinkDivergedError, LedgerHoleError, OSError)  # of a required sink: it can be joined later


class Opening:
    """Starts one run and puts what it reads into `Progress`.

    All steps except `join` run on the deciding sink's lane. They read the other sinks through separate handles, because
    an epoch may be committed to one of them at the same time.
    """

    def __init__(self, context: RunContext, *, accept_duplicates: bool) -> None:
        self._pipeline = context.pipeline
        self._progress = context.progress
        self._checkpoints = context.checkpoints
        self._jobs = context.jobs
        self._states = context.states
        self._run = context.run
        self._accept_duplicates = accept_duplicates
        self._baseline_version = -1
        self._others = context.pipeline.open_readers()[1:]
        self.unread: dict[str, str] = {}  # further sinks that could not be read, with the reason

    def read_sinks(self, on_copy_change: Callable[[], None] = lambda: None) -> m.Event:
        """Read the heads of sinks and copies. Writes nothing to a sink. Repeatable.

        `on_copy_change` is called, from any thread, after every successful or failed write to the store or a tier.
        """
        recorder, progress = self._pipeline.recorder, self._progress
        recorder.read_copies(on_copy_change)
        self._pipeline.deciding.check_whole()  # before any copy of it is made
        held = self._pipeline.deciding.load()
        if held.exists:
            self._pipeline.deciding.make_durable()
        if held.checkpoint is None and held.generation >= GENERATION_LEAP:
            raise CheckpointLostError(
                f"the recovery of the journal in {self._pipeline.storage.root} was begun and has not ended",
                hint="Repeat it: firnline recover --from SINK --yes",
            )
        if held.checkpoint is None and not held.generation:  # a log that has our claim has every epoch before it
            self._check_no_history()
        self._check_ledger_is_here(held)
        held = recorder.confirm(held, self._pipeline.deciding.load)
        if self._states is not None or (held.checkpoint is not None and held.checkpoint.state):
            check_operators(self._pipeline, self._jobs.flow, held)
        if held.exists and held.checkpoint is None:
            progress.baseline = self._find_baseline(held.version)
        self._set_tip(held)
        tip = progress.baseline.checkpoint.attempt if progress.baseline else held.attempt
        epochs = {self._pipeline.deciding.name: held.epoch}
        known = known_sinks(held.checkpoint)
        check_known(known, self._pipeline.options.followers)
        away = find_away(held.checkpoint, self._pipeline.options.followers)
        _check_quorum(self._pipeline.options, len(self._others) + 1, away)
        check_new(self._pipeline, held)
        heads: dict[str, Head] = {}
        for sink in self._others:
            if sink.name in away:
                epochs[sink.name] = 0  # it counts nowhere
                logger.warning("sink is set aside", extra={"sink": sink.name, "reason": away[sink.name]})
                continue
            try:
                heads[sink.name] = sink.load()
                epochs[sink.name] = self._read_further(sink, heads[sink.name], held)
            except (FirnlineError, OSError) as error:  # it lags until it can be joined
                if sink.required and not isinstance(error, LAGGING):
                    raise
                logger.warning("sink could not be read", extra={"sink": sink.name, "reason": str(error)})
                self.unread[sink.name] = str(error)
        find_new_tables(self._pipeline, held, heads)  # raises if one cannot join
        unknown = held.checkpoint is None and progress.baseline is None
        if unknown:
            self._check_others_know_nothing(epochs)
        # Pending units may still be taken back, so nothing outside the table records them.
        pending = held.committed is not None and held.committed < held.epoch
        recorded = recorder.begin(self._pipeline.deciding.load_committed() if pending else held)
        if unknown:
            logger.info("no sink, store or tier knows this pipeline", extra={"pipeline": self._pipeline.options.name})
        owed = held.checkpoint is not None and self._pipeline.sources.want_acknowledgement
        if owed:
            self._checkpoints.begin(held)
        return m.SinksRead(
            tip,
            tuple(epochs.items()),
            recorded=recorded,
            committed=held.committed,
            owed=owed,
            away=tuple(away),
            filling=tuple(name for name in self._find_filled(held) if epochs.get(name, 0) < held.epoch),
        )

    def _find_filled(self, held: Head) -> list[str]:
        """Return the sinks that are being filled, or will be as soon as this run has claimed."""
        options = self._pipeline.options
        new = [one.name for one in find_new(options, held.checkpoint)]
        return [*find_filling(held.checkpoint, options.followers), *new]

    def _read_further(self, sink: Sink, held: Head, decided: Head) -> int:
        """Return the epoch of a further sink. It is on the decided chain, or a history edit leads to that chain."""
        if held.epoch > decided.epoch:  # another run is active, and both sinks moved since
            decided = self._pipeline.deciding.load()
        tip = decided.entry
        if begins_now(self._pipeline, sink, held, decided):
            return decided.epoch
        if tip is None or held.epoch == 0:
            first = first_entry(self._pipeline, sink, held, decided)
            return first.epoch if first is not None else held.epoch
        if not any(entry.is_history_edit for entry, _ in ahead_of(self._pipeline, tip, held.epoch, sink.name)):
            prove_on_chain(self._pipeline, sink.name, held, tip)
        return held.epoch

    def _check_no_history(self) -> None:
        """Check that, without a table, the ledger has no more epochs than can be in flight at once."""
        staged = self._pipeline.ledger.newest_epoch()
        if staged > self._pipeline.options.batch.max_inflight:
            root = self._pipeline.storage.root
            raise CheckpointLostError(
                f"the ledger knows epoch {staged}, but {self._pipeline.decided_in} {root} is gone",
                hint=f"Restore {root}/_delta_log from a backup; to start over, move the whole folder away."
                + (" " + RECOVER_HINT if self._pipeline.options.journal is not None else ""),
                epoch=staged,
            )

    def _find_baseline(self, version: int) -> LedgerEntry | None:
        """Return another tool's progress from the table's log, as the entry that the first claim names."""
        self._baseline_version = version
        scan = self._pipeline.options.checkpoint.recovery_scan_commits
        found = self._pipeline.deciding.find_foreign(version, scan, accept_older=self._accept_duplicates)
        if found is None:
            return None
        source = self._pipeline.sources.only
        if source is None:
            raise ConfigError(
                f"the table {self._pipeline.storage.root} was filled by another tool, from one source alone",
                hint="Take over with a spec of that one source first, or write to another table.",
            )
        position, records = source.adopt(found)
        name = source.name
        checkpoint = self._checkpoints.make(
            0, self._pipeline.ids.new(), 0, Base(0, None, None, {name: position}, None), None
        )
        return LedgerEntry(checkpoint, None, {name: records}, kind="baseline")

    def _check_others_know_nothing(self, epochs: dict[str, int]) -> None:
        """Refuse a further sink with epochs that the deciding sink lacks: they would never be committed there again."""
        ahead = {name: epoch for name, epoch in epochs.items() if epoch}
        if ahead and self._pipeline.deciding.load().checkpoint is None:  # otherwise another run started in between
            name, epoch = ahead.popitem()
            raise StoreAheadError(
                f"sink {name!r} holds epoch {epoch}, but {self._pipeline.storage.root}, which decides, knows nothing",
                hint=f"Bring {self._pipeline.decided_in} back. If `home`, the order of the sinks, `required` or a "
                "table in the spec was changed, change it back: what decided so far goes on deciding. A table that was "
                "added needs `start` in the spec (now, or snapshot): then it does not decide."
                + (" " + RECOVER_HINT if self._pipeline.options.journal is not None else ""),
                epoch=epoch,
            )

    def _check_ledger_is_here(self, held: Head) -> None:
        """Check the location of the ledger, for a checkpoint that names no deciding table.

        Raises:
            DecidingSinkError: the ledger is in another sink's table.
        """
        if held.checkpoint is None or held.checkpoint.deciding.get("table") or self._pipeline.ledger.newest_epoch():
            return
        for sink in self._others:
            if self._has_ledger(sink):
                raise DecidingSinkError(
                    f"{self._pipeline.storage.root} would decide, but the ledger of "
                    f"{self._pipeline.options.name!r} lies in the table of sink {sink.name!r}, which decided so far",
                    hint=f"List the sink {sink.name!r} first, with required: true.",
                    epoch=held.epoch,
                )

    def _has_ledger(self, sink: Sink) -> bool:
        """Return whether a further sink has a ledger of this pipeline. An optional one that cannot be read has none."""
        if sink.storage is None:
            return False
        try:
            return Ledger(sink.storage, self._pipeline.options.name).newest_epoch() > 0
        except OSError as error:
            if sink.required:
                raise
            logger.warning("sink could not be read", extra={"sink": sink.name, "reason": str(error)})
            return False

    def claim(self, *, again: bool = False) -> m.Event:
        """Claim a generation and continue from the head under it. With `again`, this run owned the pipeline before."""
        sink, recorder = self._pipeline.deciding, self._pipeline.recorder
        recorder.before_claim(sink.load)
        if self._progress.baseline is not None and not again:
            held = self._claim_onto_baseline()
        else:
            held = sink.claim(self._run, again=again)
        check_hold(self._pipeline)
        recorder.claimed(held, self._run)
        ask_for_rows(self._pipeline, held, self._read_heads)
        held = decide_fills(self._pipeline, held, self._run, held.generation)
        self._progress.generation = held.generation
        base = self._set_tip(held)
        self._jobs.sweep_all()
        if self._states is not None:
            self._states.restore(held, base)
        self._checkpoints.begin(held)
        if sink.settled_epoch() is not None:
            self._checkpoints.note_committed(sink.load_committed())
        if held.exists:
            options = self._pipeline.options
            port = find_source(options, decided_input(options))
            if port is not None:
                sink.check_columns(declared(*port))
        away = find_away(held.checkpoint, self._pipeline.options.followers)
        return m.Claimed(held.epoch, held.attempt, held.committed, tuple(away), tuple(self._find_filled(held)))

    def _read_heads(self) -> dict[str, Head]:
        """Return the heads of the further tables that can be read."""
        heads: dict[str, Head] = {}
        for sink in self._others:
            with contextlib.suppress(FirnlineError, OSError):
                if not sink.capabilities.fed_from_outbox:
                    heads[sink.name] = sink.load()
        return heads

    def _claim_onto_baseline(self) -> Head:
        """Claim onto the version that has the other tool's progress. If the table moved, read the progress again."""
        for _ in range(CLAIM_TRIES):
            assert self._progress.baseline is not None
            ref = self._pipeline.ledger.stage(self._progress.baseline)
            try:
                return self._pipeline.deciding.claim(self._run, baseline=ref, onto=self._baseline_version)
            except CommitConflictError:
                self._progress.baseline = self._find_baseline(self._pipeline.deciding.load().version)
        raise SinkError(
            f"gave up after {CLAIM_TRIES} conflicts with the other tool; stop it before Firnline takes over"
        )

    def join(self, name: str) -> m.Event:
        """Register our generation in a further sink and apply the history edits that it lacks.

        Epochs before an edit are delivered on the way; rows of them that are damaged in the outbox are made again.
        """
        head, sink = self._progress.head, self._pipeline.sink(name)
        register = partial(join, self._pipeline, sink, self._run, self._progress.generation, head, self._jobs.run_tasks)
        try:
            return m.Joined(name, register())
        except OutboxDamagedError as error:
            logger.warning("outbox damaged", extra={"sink": name, "reason": error.message})
            rerun = Rerun(self._pipeline, self._progress, self._jobs)
            for entry, _ in ahead_of(self._pipeline, head.entry, sink.load().epoch, name):
                if not entry.is_history_edit:
                    rerun.repair(sink, entry, staged_for(entry, sink))
        return m.Joined(name, register())

    def _set_tip(self, held: Head) -> Base:
        """Use the deciding sink's head as the base of the next plan."""
        progress = self._progress
        progress.head = held
        checkpoint = held.checkpoint or (progress.baseline.checkpoint if progress.baseline else None)
        stored = checkpoint.positions if checkpoint else {}
        self._check_sources(stored)
        base = Base(
            epoch=held.epoch,
            entry=held.entry,
            checkpoint=checkpoint,
            positions=self._pipeline.sources.start(stored),
            table=None,
            watermarks=known_watermarks(self._jobs.flow, checkpoint),
            snapshots=dict(checkpoint.state) if checkpoint else {},
            topology=dict(checkpoint.topology) if checkpoint else {},
        )
        self.learn_columns(base)
        progress.bases[checkpoint.attempt if checkpoint else ""] = base
        return base

    def _check_sources(self, stored: Mapping[str, Json]) -> None:
        """Refuse a spec without a source that the checkpoint has: under another name it would be read again from the
        start."""
        gone = [name for name in stored if name not in self._pipeline.sources.names]
        if gone:
            raise ConfigError(
                f"the checkpoint knows a source {gone[0]!r}, which the spec no longer has",
                hint="Give the source the name that it had; to leave it out, keep it with a path that has no files.",
            )

    def learn_columns(self, base: Base) -> None:
        """Read the known columns: those of tables that take a source unchanged, and those of the checkpoint.

        Raises:
            SinkError: a required sink cannot be read. Columns are never guessed anew, because the table would refuse
                an epoch that is already decided.
        """
        options = self._pipeline.options
        base.table = self._pipeline.deciding.find_schema()
        recorded = columns_from_json(base.checkpoint.columns if base.checkpoint else {})
        base.columns = {port: recorded[port] for port in operator_ports(options) if port in recorded}
        for sink, one in zip((None, *self._others), options.ordered_sinks, strict=True):
            port = "" if one is options.journal else sink_input(options, one)
            if find_source(options, port) is not None and port not in base.columns:
                known = sink is None or not sink.capabilities.fed_from_outbox  # a follower that lags knows less
                columns = base.table if sink is None else _find_schema(sink) if known else None
                if columns is None:
                    columns = recorded.get(port)
                if columns is not None:
                    base.columns[port] = columns


def _check_quorum(options: PipelineOptions, sinks: int, away: Mapping[str, str]) -> None:
    """Refuse a run whose quorum needs a sink that is set aside: no epoch could be settled.

    Raises:
        ConfigError: it names the sinks.
    """
    if len(away) > count_spare(options, sinks):
        raise ConfigError(
            f"batch.quorum is {options.batch.quorum}, and it needs a sink that is set aside: {', '.join(sorted(away))}",
            hint=f"Bring it back: firnline sinks resync {min(away)} --yes; or lower batch.quorum.",
        )


def _find_schema(sink: Sink) -> pa.Schema | None:
    """Return the columns of a further sink; None if it has none, or is optional and cannot be read."""
    try:
        return sink.find_schema()
    except FirnlineError as error:
        if sink.required:
            raise
        logger.warning("sink could not be read", extra={"sink": sink.name, "reason": str(error)})
        return None
