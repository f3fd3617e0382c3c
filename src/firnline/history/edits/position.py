"""Changes the position of a source by hand: sets it to another place, or skips input.

The change is a history edit: an epoch that reads nothing, with the same state and the positions of the others. What a
position means, and what is read again or never because of the change, the source itself says (`Source.set_position`,
`Source.skip`). The plan and the edit look at the same head: if the pipeline moved in between, nothing is done.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Literal

from firnline.checkpoint.ledger import LedgerEntry
from firnline.errors import CheckpointError, ConfigError
from firnline.history.store import on_record
from firnline.jobs.dataflow import dataflow_of
from firnline.operators.columns import suggest
from firnline.run.edits import perform_edit
from firnline.run.joining import committed_columns, edit_checkpoint
from firnline.run.open_pipeline import OpenPipeline
from firnline.sinks.base import Head
from firnline.sources.base import PositionChange
from firnline.types import Json, Receipt

Action = Literal["set", "skip"]


@dataclass(frozen=True, slots=True)
class PositionPlan:
    """What a change of a position does. `already`: the source stands there, and nothing is done."""

    pipeline: str
    action: Action
    source: str
    words: str
    epoch: int  # of the deciding sink, now
    before: Json  # the position
    after: Json
    again: list[str]  # input that was read and is read again
    never: list[str]  # input that was not read and never is
    again_count: int
    never_count: int
    unit: str  # what is counted
    doubled_in: list[str] = field(default_factory=list)  # sinks that append: they get the rows again
    operators: list[str] = field(default_factory=list)  # with state: they take the rows in again
    already: bool = False
    new_epoch: int | None = None


def load_positions(pipeline: OpenPipeline) -> tuple[int, dict[str, Json]]:
    """Return the newest epoch and the position of every source; None for a source that has none yet."""
    head = pipeline.load()
    known = head.checkpoint.positions if head.checkpoint is not None else {}
    return head.epoch, {name: known.get(name) for name in pipeline.sources.names}


class PositionEdit:
    """Sets or skips the position of one source: `plan` is read-only, `perform` does it."""

    def __init__(self, pipeline: OpenPipeline, action: Action, source: str, words: str) -> None:
        self._pipeline = pipeline
        self._action: Action = action
        self._source = source
        self._words = words.strip()

    def plan(self) -> PositionPlan:
        """Check the change against the pipeline and the source. Writes nothing.

        Raises:
            ConfigError: there is no such source, or it cannot stand there.
            SourceError: the source does not answer.
        """
        return self._read()[0]

    def perform(self, run: str, tell: Callable[[str], None] = lambda _: None) -> tuple[PositionPlan, Receipt | None]:
        """Decide the change. Returns no receipt if there was nothing to do.

        Raises:
            CheckpointError: the pipeline moved since the plan was made; only the generation was changed.
            FencedError: another run took over meanwhile.
        """
        plan, _, planned = self._read()
        if plan.already:
            return plan, None
        pipeline = self._pipeline

        def look(generation: int) -> tuple[LedgerEntry, Head]:
            now, change, head = self._read()
            if head.entry != planned.entry or (now.again, now.never) != (plan.again, plan.never):
                raise CheckpointError(
                    f"the pipeline or the input of source {self._source!r} moved since the plan was made",
                    hint=f"Look at the plan again: firnline position {self._action} {self._source} '{self._words}'",
                )
            return self._entry(head, change, generation, run), pipeline.deciding.load_committed()

        details: dict[str, Json] = {
            "source": plan.source,
            "words": plan.words,
            "before": plan.before,
            "after": plan.after,
            f"{plan.unit}s_again": plan.again_count,
            f"{plan.unit}s_never": plan.never_count,
        }
        with on_record(
            pipeline, f"position-{self._action}", run, from_epoch=plan.epoch, to_epoch=plan.epoch + 1, **details
        ):
            receipt = perform_edit(pipeline, run, look, tell, goes_on_from=planned.entry)
        return replace(plan, new_epoch=receipt.epoch), receipt

    def _read(self) -> tuple[PositionPlan, PositionChange, Head]:
        pipeline = self._pipeline
        if self._source not in pipeline.sources.names:
            raise ConfigError(
                f"the pipeline has no source {self._source!r}", hint=suggest(self._source, pipeline.sources.names)
            )
        head, committed = pipeline.deciding.load(), pipeline.deciding.load_committed()
        if head.checkpoint is None:
            raise ConfigError(
                f"pipeline {pipeline.options.name!r} has no history yet",
                hint="Set where it begins with `start` or `start_after` of the source.",
            )
        if committed.epoch != head.epoch:
            raise CheckpointError(
                f"{pipeline.deciding.name} is at epoch {committed.epoch}; later ones wait for a committer",
                hint="Commit them first: firnline committer --once",
            )
        source = pipeline.sources[self._source]
        stored = head.checkpoint.positions.get(self._source)
        position = source.start(stored)
        done = self._is_done(head)
        if done:
            change = PositionChange(position)
        else:
            change = (source.set_position if self._action == "set" else source.skip)(position, self._words)
        options = pipeline.options
        plan = PositionPlan(
            pipeline=options.name,
            action=self._action,
            source=self._source,
            words=self._words,
            epoch=head.epoch,
            before=position,
            after=change.position,
            again=list(change.again),
            never=list(change.never),
            again_count=change.again_count,
            never_count=change.never_count,
            unit=change.unit,
            doubled_in=[sink.name for sink in options.sinks if sink.write == "append"] if change.again else [],
            operators=sorted(one.name for one in dataflow_of(options).stateful) if change.again else [],
            already=done or (change.position == position and stored is not None),
        )
        return plan, change, head

    def _is_done(self, head: Head) -> bool:
        """Return whether the newest epoch is this very skip: a command that is repeated skips nothing more."""
        if self._action != "skip" or head.entry is None:
            return False
        entry = self._pipeline.ledger.find(head.entry)
        return (
            isinstance(entry, LedgerEntry)
            and entry.kind == "position"
            and (entry.edit["action"], entry.edit["source"]) == (self._action, self._source)
            and entry.edit["words"] == self._words
        )

    def _entry(self, head: Head, change: PositionChange, generation: int, run: str) -> LedgerEntry:
        pipeline, base = self._pipeline, head.checkpoint
        assert base is not None
        checkpoint = edit_checkpoint(pipeline, base, base, epoch=head.epoch + 1, generation=generation, run=run)
        return LedgerEntry(
            checkpoint=replace(checkpoint, positions={**base.positions, self._source: change.position}),
            previous=head.entry,
            previous_checkpoint=base.checksum,
            inputs={self._source: list(change.records)} if change.records else {},
            schema=committed_columns(pipeline),
            kind="position",
            onto=head.entry,
            edit={"to_epoch": head.epoch, "action": self._action, "source": self._source, "words": self._words},
        )
