"""Edits of what a pipeline remembers of its followers: forget one, let one go on after a gap, copy one anew.

Each is decided by an epoch that reads nothing: its checkpoint remembers the change. A copy is that epoch's rows for the
one sink: they wait in the outbox, and are delivered like any others.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Literal

from firnline.checkpoint.ledger import LedgerEntry
from firnline.errors import ConfigError, FirnlineError, LedgerHoleError, SinkError
from firnline.graph import sink_input
from firnline.history.agreed import check_agreed
from firnline.history.store import on_record
from firnline.names import outbox_folder, resync_request
from firnline.operators.columns import suggest
from firnline.run.commits import name_in, staged_for
from firnline.run.copied_rows import find_copied, stage_copy
from firnline.run.edits import perform_edit
from firnline.run.joining import committed_columns, edit_checkpoint, no_columns
from firnline.run.new_tables import find_others, source_ports, takes
from firnline.run.open_pipeline import OpenPipeline
from firnline.schema import schema_to_json
from firnline.sinks.base import Head, Sink
from firnline.sinks.dead_letters import settle
from firnline.sinks.known import COPY, KnownSink, known_sinks
from firnline.sources.base import CapturedTable
from firnline.types import Json, Receipt

Action = Literal["forget", "resume", "resync"]


@dataclass(frozen=True, slots=True)
class SinkPlan:
    """What an edit does to one follower."""

    pipeline: str
    action: Action
    sink: str
    target: str
    epoch: int  # of the deciding sink, now
    held: int  # the newest epoch that the sink was seen to hold; 0: none
    set_aside: str
    copy_from: str = ""
    removes_rows: bool = False  # whether the copy takes the place of the rows that the sink wrote before
    new_epoch: int | None = None
    rows: int | None = None  # that were copied
    rows_dropped: int | None = None  # of a resume: that the sink never gets; None: the ledger no longer says
    # Of a resync without a table to copy: captured tables that the next run reads again, those that have no key and
    # lack changes for good, whether the tables are emptied first, and other sinks that get the rows again.
    reads: tuple[str, ...] = ()
    loses: tuple[str, ...] = ()
    empties: bool = False
    again: tuple[str, ...] = ()

    def agreed(self) -> dict[str, Json]:
        """Return what somebody who confirms the plan agrees to."""
        return {
            "action": self.action,
            "sink": self.sink,
            "target": self.target,
            "set_aside": self.set_aside,
            "copy_from": self.copy_from,
            "removes_rows": self.removes_rows,
            "reads": list(self.reads),
            "loses": list(self.loses),
            "again": list(self.again),
        }

    @property
    def epochs_skipped(self) -> int:
        """The epochs that the sink never gets."""
        return self.epoch - self.held if self.action == "resume" else 0


class SinkEdit:
    """Forgets a follower, lets it go on after a gap, or copies it anew."""

    def __init__(self, pipeline: OpenPipeline, action: Action, sink: str, copy_from: str = "") -> None:
        self._pipeline = pipeline
        self._action: Action = action
        self._name = sink
        self._copy_from = copy_from

    def plan(self) -> SinkPlan:
        """Check the edit against the pipeline. Writes nothing.

        Raises:
            ConfigError: there is no such sink, or it cannot be copied from that one.
        """
        return self._plan(self._pipeline.load())

    def _plan(self, head: Head) -> SinkPlan:
        known = self._find_known(head)
        if self._action == "resync" and self._reads_again():
            plan = self._plan_reads(head)
            return replace(plan, target=known.target, held=known.held, set_aside=known.set_aside)
        source = self._find_source().name if self._action == "resync" else ""
        held = self._find_held(known) if self._action == "resume" else known.held
        return SinkPlan(
            pipeline=self._pipeline.options.name,
            action=self._action,
            sink=self._name,
            target=known.target,
            epoch=head.epoch,
            held=held,
            set_aside=known.set_aside,
            copy_from=source,
            removes_rows=bool(source) and self._pipeline.sink(self._name).capabilities.replaces,
            rows_dropped=self._count_dropped(head, held) if self._action == "resume" else None,
        )

    def _find_held(self, known: KnownSink) -> int:
        """Return the newest epoch that the sink holds, or was seen to hold if it cannot be read."""
        try:
            return max(known.born, self._pipeline.sink(self._name).load().epoch)
        except (FirnlineError, OSError):
            return known.held

    def _count_dropped(self, head: Head, held: int) -> int | None:
        """Return the rows that wait for the sink behind an epoch; None if the ledger no longer says."""
        sink, rows = self._pipeline.sink(self._name), 0
        try:
            for entry, _ in self._pipeline.ledger.entries(head.entry):
                if entry.epoch <= held:
                    return rows
                if name_in(entry, sink) is None and entry.staged:
                    return None  # it was set aside by then, so nobody staged them
                rows += sum(int(file["rows"]) for file in staged_for(entry, sink))
        except LedgerHoleError:
            return None
        return rows if not held else None

    # -- captured tables that are read again -------------------------------------------------------------

    def _reads_again(self) -> bool:
        """Return whether captured tables are read again, since no table has the rows that could be copied."""
        options = self._pipeline.options
        target = next((one for one in options.sinks if one.name == self._name), None)
        if target is None or self._copy_from or getattr(target, "copy_from", ""):
            return False
        port = sink_input(options, target)
        if any(not one.fed_from_outbox and sink_input(options, one) == port for one in options.sinks):
            return False
        return all(self._pipeline.sources[source].has_log for source, _ in self._ports())

    def _ports(self) -> list[tuple[str, str]]:
        return source_ports(self._pipeline, "sink", self._name)

    def _find_captured(self, head: Head) -> dict[tuple[str, str], CapturedTable]:
        """Return the captured tables whose rows reach the sink, and that may have changed, by source and name."""
        found: dict[tuple[str, str], CapturedTable] = {}
        positions = head.checkpoint.positions if head.checkpoint is not None else {}
        for source, port in self._ports():
            if source in positions:
                tables = self._pipeline.sources[source].find_losing(positions[source], port)
                found |= {(source, table.name): table for table in tables}
        return found

    def _plan_reads(self, head: Head) -> SinkPlan:
        pipeline, tables = self._pipeline, self._find_captured(head)
        reads = [one for one, table in tables.items() if table.key]
        others = find_others(pipeline, self._name, reads)
        if counting := [one.name for one in others if one.kind == "operator"]:
            raise ConfigError(
                f"no table has the rows of sink {self._name!r}, and its captured tables cannot be read again: operator "
                f"{counting[0]} keeps state and would count the rows twice",
                hint=f"Without what it lacks it goes on: firnline sinks resume {self._name} --accept-gap",
            )
        return SinkPlan(
            pipeline.options.name,
            self._action,
            self._name,
            target="",
            epoch=head.epoch,
            held=0,
            set_aside="",
            reads=tuple(table for _, table in reads),
            loses=tuple(table.name for table in tables.values() if not table.key),
            empties=self._may_empty(reads),
            again=tuple(one.name for one in others),
        )

    def _may_empty(self, reads: list[tuple[str, str]]) -> bool:
        """Return whether every sink that upserts rows of these tables can empty them; to others it is a bad row."""
        followers = [one for one in self._pipeline.options.followers if one.write == "upsert"]
        reached = [
            one.name
            for one in followers
            if any(takes(self._pipeline, *port, reads) for port in source_ports(self._pipeline, "sink", one.name))
        ]
        return all(self._pipeline.sink(name).can_empty for name in reached)

    def _ask(self, head: Head) -> None:
        """Ask for the tables, before the edit is decided: after a kill they may be read in vain, and are asked for
        again. Repeatable: the epoch and the table name a request."""
        pipeline, tables = self._pipeline, self._find_captured(head)
        empties = self._may_empty([one for one, table in tables.items() if table.key])
        for (source, table), facts in tables.items():
            if facts.key:
                name = resync_request(self._name, head.epoch, source, table)
                pipeline.requests.ask_snapshot(table, source, where="", empties=empties, ids=pipeline.ids, name=name)

    def perform(
        self, run: str, tell: Callable[[str], None] = lambda _: None, agreed: Mapping[str, Json] | None = None
    ) -> tuple[SinkPlan, Receipt]:
        """Decide the edit.

        Args:
            agreed: `SinkPlan.agreed` of the plan that somebody confirmed; None if nobody was asked.

        Raises:
            PlanChangedError: it would be another edit than the one that was agreed to; nothing is decided.
            FencedError: another run took over meanwhile.
            SinkError: a sink cannot be claimed, or the rows cannot be read; nothing is decided.
        """
        plan, pipeline = self.plan(), self._pipeline
        check_agreed(agreed, plan.agreed())
        rows: list[int] = []

        def look(generation: int) -> tuple[LedgerEntry, Head]:
            head = pipeline.deciding.load()
            check_agreed(agreed, self._plan(head).agreed())
            known = known_sinks(head.checkpoint).get(self._name)
            if known is not None and head.checkpoint:  # what it remembers of answered dead letters goes with it
                floor = head.checkpoint.floor
                settle(pipeline.storage, pipeline.options.name, known.head_name, known, head.epoch, floor)
            entry = self._entry(head, generation, run, tell)
            rows[:] = [sum(int(file["rows"]) for file in entry.staged.get(self._name, []))]
            return entry, pipeline.deciding.load_committed()

        details: dict[str, Json] = {"sink": self._name, "copy_from": plan.copy_from}
        if plan.reads or plan.loses:
            details |= {"reads": list(plan.reads), "loses": list(plan.loses)}
        if self._action == "resume":
            details |= {"epochs_dropped": plan.epochs_skipped, "rows_dropped": plan.rows_dropped}
        with on_record(
            pipeline, f"sinks-{self._action}", run, from_epoch=plan.epoch, to_epoch=plan.epoch + 1, **details
        ):
            receipt = perform_edit(pipeline, run, look, tell, skip=[self._name])
        return replace(plan, new_epoch=receipt.epoch, rows=rows[0]), receipt

    def _find_known(self, head: Head) -> KnownSink:
        if head.checkpoint is None:
            raise ConfigError(
                f"pipeline {self._pipeline.options.name!r} has no history yet", hint="Run it first: firnline run"
            )
        known = known_sinks(head.checkpoint)
        options = {one.name: one for one in self._pipeline.options.followers}
        follower = options.get(self._name)
        is_kept = follower is not None and self._name in known and follower.target == known[self._name].target
        if self._action == "forget" and is_kept:
            raise ConfigError(
                f"the spec still has the sink {self._name!r} with the same target",
                hint=f"Take it out of the spec first; to let it go on without what it lacks: "
                f"firnline sinks resume {self._name} --accept-gap",
            )
        if self._name in known:
            return known[self._name]
        if self._name in options and self._action != "forget":  # new: it begins here
            return KnownSink(options[self._name].target, 0, 0, options[self._name].head_name)
        names = sorted(known if self._action == "forget" else known.keys() | options.keys())
        hint = suggest(self._name, names) if names else "Delta tables are not listed: they hold their own rows."
        raise ConfigError(f"the pipeline delivers to no sink {self._name!r}", hint=hint, unknown="sink")

    def _find_source(self) -> Sink:
        """Return the sink to copy from: the named one, or the only table with the same input."""
        options = self._pipeline.options
        target = next((one for one in options.sinks if one.name == self._name), None)
        wanted = self._copy_from or getattr(target, "copy_from", "")
        return self._pipeline.sink(find_copied(options, self._name, wanted))

    def _entry(self, head: Head, generation: int, run: str, tell: Callable[[str], None]) -> LedgerEntry:
        pipeline = self._pipeline
        assert head.checkpoint is not None
        epoch = head.epoch + 1
        checkpoint = edit_checkpoint(
            pipeline, head.checkpoint, head.checkpoint, epoch=epoch, generation=generation, run=run
        )
        known = {name: one.to_json() for name, one in known_sinks(head.checkpoint).items() if name != self._name}
        staged: dict[str, list[dict[str, Json]]] = {sink.name: [] for sink in pipeline.sinks}
        schemas = no_columns(pipeline)
        shapes = {sink.name: shape for sink in pipeline.sinks if (shape := sink.shape())}
        before = replace(self._find_known(head), set_aside="", filled_from="", filled_since=0)
        if self._action == "resume":
            known[self._name] = replace(before, born=epoch, held=epoch).to_json()
        elif self._action == "resync" and self._reads_again():
            known[self._name] = replace(before, born=epoch, held=epoch).to_json()
            self._ask(head)
            tell("asked for the captured tables")
        elif self._action == "resync":
            known[self._name] = replace(before, born=head.epoch, held=head.epoch, copy=epoch).to_json()
            self._check_in_sync(head)
            folder = outbox_folder(pipeline.options.name)
            source = self._find_source()
            staged[self._name], schema = stage_copy(pipeline, self._name, checkpoint.attempt, source, folder)
            schemas[self._name] = schema_to_json(schema)
            shapes[self._name] = {**shapes.get(self._name, {}), COPY: True}
            tell(f"copied {sum(int(file['rows']) for file in staged[self._name])} rows into the outbox")
        return LedgerEntry(
            checkpoint=replace(checkpoint, sinks=known),
            previous=head.entry,
            previous_checkpoint=head.checkpoint.checksum,
            inputs={},
            staged=staged,
            schema=committed_columns(pipeline),
            schemas=schemas,
            shapes=shapes,
            epoch_time=checkpoint.created_at if pipeline.options.operators else "",
        )

    def _check_in_sync(self, head: Head) -> None:
        """Refuse to copy a table that lacks an epoch: the copy would lack it for good."""
        source = self._find_source()
        epoch = source.load_committed().epoch
        if epoch != head.epoch:
            raise SinkError(
                f"sink {source.name!r} holds epoch {epoch}, and epoch {head.epoch} is decided: a copy would lack rows",
                hint="Let the pipeline run until that table is in sync (firnline sinks list), or copy another one.",
            )
