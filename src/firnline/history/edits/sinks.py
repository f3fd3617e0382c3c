"""Edits of what a pipeline remembers of its followers: forget one, let one go on after a gap, copy one anew.

Each is decided by an epoch that reads nothing: its checkpoint remembers the change. A copy is that epoch's rows for the
one sink: they wait in the outbox, and are delivered like any others.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Literal

from firnline.checkpoint.ledger import LedgerEntry
from firnline.errors import ConfigError, SinkError
from firnline.history.store import on_record
from firnline.names import outbox_folder
from firnline.operators.columns import suggest
from firnline.run.edits import perform_edit
from firnline.run.fill import find_copied, stage_copy
from firnline.run.joining import committed_columns, edit_checkpoint, no_columns
from firnline.run.open_pipeline import OpenPipeline
from firnline.schema import schema_to_json
from firnline.sinks.base import Head, Sink
from firnline.sinks.dead_letters import settle
from firnline.sinks.follower import COPY
from firnline.sinks.known import KnownSink, known_sinks
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
        head = self._pipeline.load()
        known = self._find_known(head)
        source = self._find_source().name if self._action == "resync" else ""
        return SinkPlan(
            pipeline=self._pipeline.options.name,
            action=self._action,
            sink=self._name,
            target=known.target,
            epoch=head.epoch,
            held=known.held,
            set_aside=known.set_aside,
            copy_from=source,
            removes_rows=bool(source) and self._pipeline.sink(self._name).capabilities.replaces,
        )

    def perform(self, run: str, tell: Callable[[str], None] = lambda _: None) -> tuple[SinkPlan, Receipt]:
        """Decide the edit.

        Raises:
            FencedError: another run took over meanwhile.
            SinkError: a sink cannot be claimed, or the rows cannot be read; nothing is decided.
        """
        plan, pipeline = self.plan(), self._pipeline
        rows: list[int] = []

        def look(generation: int) -> tuple[LedgerEntry, Head]:
            head = pipeline.deciding.load()
            known = known_sinks(head.checkpoint).get(self._name)
            if known is not None and head.checkpoint:  # what it remembers of answered dead letters goes with it
                floor = head.checkpoint.floor
                settle(pipeline.storage, pipeline.options.name, known.head_name, known, head.epoch, floor)
            entry = self._entry(head, generation, run, tell)
            rows[:] = [sum(int(file["rows"]) for file in entry.staged.get(self._name, []))]
            return entry, pipeline.deciding.load_committed()

        details: dict[str, Json] = {"sink": self._name, "copy_from": plan.copy_from}
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
        raise ConfigError(f"the pipeline delivers to no sink {self._name!r}", hint=hint)

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
