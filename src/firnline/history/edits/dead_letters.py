"""Answers dead letters: delivers them once more, or drops them.

The answer is decided by an epoch that reads nothing. Its rows for a sink are the rows of the letters: they wait in the
outbox, and are delivered like any others. A row that the sink refuses again becomes a dead letter of that epoch.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import TypeAlias

import pyarrow as pa

from firnline.checkpoint.ledger import LedgerEntry
from firnline.errors import ConfigError, FirnlineError
from firnline.history.agreed import check_agreed
from firnline.history.dead_letters import EVERYTHING, LetterFilter, find_letters, known_by_spec, letter_sinks
from firnline.history.store import on_record
from firnline.names import outbox_folder
from firnline.operators.columns import suggest
from firnline.run.copied_rows import stage_rows
from firnline.run.edits import perform_edit
from firnline.run.joining import committed_columns, edit_checkpoint, no_columns
from firnline.run.open_pipeline import OpenPipeline
from firnline.schema import schema_to_json
from firnline.sinks.base import Head
from firnline.sinks.dead_letters import Answer, Answers, LetterFile, settle
from firnline.sinks.known import KnownSink, known_sinks
from firnline.sinks.shaping import RowShape
from firnline.types import Json, Receipt

logger = logging.getLogger(__name__)

_Chosen: TypeAlias = dict[str, tuple[LetterFile, list[int]]]  # of one sink, by key: a file and places in it


@dataclass(frozen=True, slots=True)
class LetterPlan:
    """What an answer does."""

    pipeline: str
    action: Answer
    epoch: int  # of the deciding sink, now
    letters: int
    plan: list[dict[str, Json]]  # sink, epoch, reason, letters
    new_epoch: int | None = None

    def agreed(self) -> dict[str, Json]:
        """Return what somebody who confirms the plan agrees to."""
        return {"action": self.action, "letters": self.letters, "plan": self.plan}


def settle_letters(pipeline: OpenPipeline, head: Head) -> None:
    """Mark the newest answers as decided, and delete letters and answers that nothing needs any more."""
    if head.checkpoint is None:
        return
    sinks = letter_sinks(pipeline)
    for known in known_sinks(head.checkpoint).values():
        if known.head_name in sinks:
            settle(pipeline.storage, pipeline.options.name, known.head_name, known, head.epoch, head.checkpoint.floor)


class LetterEdit:
    """Delivers dead letters once more, or drops them."""

    def __init__(self, pipeline: OpenPipeline, action: Answer, wanted: LetterFilter = EVERYTHING) -> None:
        self._pipeline = pipeline
        self._action: Answer = action
        self._wanted = wanted

    def plan(self) -> LetterPlan:
        """Check the answer against the pipeline. Writes nothing.

        Raises:
            ConfigError: there is no such sink, or it gets no rows now.
        """
        return self._plan(self._pipeline.load())

    def _plan(self, head: Head) -> LetterPlan:
        found = self._find(head)
        counts = Counter(
            (sink, file.epoch, file.letters[place].reason)
            for sink, files in found.items()
            for file, places in files.values()
            for place in places
        )
        return LetterPlan(
            pipeline=self._pipeline.options.name,
            action=self._action,
            epoch=head.epoch,
            letters=counts.total(),
            plan=[
                {"sink": sink, "epoch": epoch, "reason": reason, "letters": number}
                for (sink, epoch, reason), number in sorted(counts.items())
            ],
        )

    def perform(
        self, run: str, tell: Callable[[str], None] = lambda _: None, agreed: Mapping[str, Json] | None = None
    ) -> tuple[LetterPlan, Receipt]:
        """Decide the answer.

        Args:
            agreed: `LetterPlan.agreed` of the plan that somebody confirmed; None if nobody was asked.

        Raises:
            PlanChangedError: it would answer other letters than those that were agreed to; nothing is decided.
            ConfigError: no letter is left to answer; nothing is decided.
            FencedError: another run took over meanwhile.
            SinkError: a sink cannot be claimed, or the outbox cannot be written; nothing is decided.
        """
        pipeline, plan = self._pipeline, self.plan()
        check_agreed(agreed, plan.agreed())
        answered: list[tuple[LetterPlan, dict[str, KnownSink], int]] = []

        def look(generation: int) -> tuple[LedgerEntry, Head]:
            head = pipeline.deciding.load()
            settle_letters(pipeline, head)
            check_agreed(agreed, self._plan(head).agreed())
            entry, after = self._entry(head, generation, run)
            answered[:] = [(self._plan(head), after, entry.checkpoint.floor)]
            return entry, pipeline.deciding.load_committed()

        details: dict[str, Json] = {"letters": plan.letters, "plan": plan.plan, **self._wanted.facts}
        with on_record(
            pipeline, f"dead-letters-{self._action}", run, from_epoch=plan.epoch, to_epoch=plan.epoch + 1, **details
        ):
            receipt = perform_edit(pipeline, run, look, tell, skip=sorted({str(one["sink"]) for one in plan.plan}))
        plan, after, floor = answered[0]
        try:
            self._settle(after, receipt.epoch, floor)
        except (OSError, FirnlineError) as error:
            logger.warning("answered dead letters are taken away later", extra={"reason": str(error)})
        return replace(plan, new_epoch=receipt.epoch), receipt

    def _settle(self, known: dict[str, KnownSink], epoch: int, floor: int) -> None:
        for one in known.values():
            reached = floor if one.target else epoch  # no rollback brings back letters of a forgotten sink
            settle(self._pipeline.storage, self._pipeline.options.name, one.head_name, one, epoch, reached)

    def _find(self, head: Head) -> dict[str, _Chosen]:
        known, wanted = known_by_spec(self._pipeline, known_sinks(head.checkpoint)), self._wanted.sink
        names = known.keys() | set(letter_sinks(self._pipeline).values())
        if wanted is not None and wanted not in names:
            hint = suggest(wanted, sorted(names))
            raise ConfigError(f"the pipeline delivers to no sink {wanted!r}", hint=hint, unknown="sink")
        found = find_letters(self._pipeline, known, self._wanted)
        if self._action == "retry":
            in_spec = {sink.name for sink in self._pipeline.sinks}
            for sink in found:
                if sink not in in_spec or sink not in known:
                    raise ConfigError(
                        f"the pipeline does not deliver to sink {sink!r}, which has dead letters",
                        hint=f"Name another sink with --sink, or drop them: firnline dead-letters drop --sink {sink}",
                    )
                if known[sink].set_aside:
                    raise ConfigError(
                        f"sink {sink!r} is set aside and gets no rows: {known[sink].set_aside}",
                        hint=f"Copy it first: firnline sinks resync {sink}. Or name another sink with --sink.",
                    )
        return found

    def _entry(self, head: Head, generation: int, run: str) -> tuple[LedgerEntry, dict[str, KnownSink]]:
        """Stage rows and lists of an answer. Returns the entry, and what is known afterwards of the sinks concerned."""
        pipeline, found = self._pipeline, self._find(head)
        if head.checkpoint is None or not found:
            raise ConfigError("no dead letter is left to answer", hint="See what there is: firnline dead-letters list")
        checkpoint = edit_checkpoint(
            pipeline, head.checkpoint, head.checkpoint, epoch=head.epoch + 1, generation=generation, run=run
        )
        known = known_by_spec(pipeline, known_sinks(head.checkpoint))
        staged: dict[str, list[dict[str, Json]]] = {sink.name: [] for sink in pipeline.sinks}
        schemas = no_columns(pipeline)
        shapes = {sink.name: shape for sink in pipeline.sinks if (shape := sink.shape())}
        after: dict[str, KnownSink] = {}
        for sink, files in found.items():
            if self._action == "retry":
                staged[sink], schema = self._stage(sink, files, checkpoint.attempt)
                schemas[sink] = schema_to_json(schema)
                shapes[sink] = {**shapes[sink], "rows": RowShape().to_json()}  # the rows have their shape
            rows = {key: [file.letters[place].row for place in places] for key, (file, places) in files.items()}
            one = known.get(sink) or KnownSink(
                "", born=0, held=checkpoint.epoch, head_name=sink
            )  # forgotten: nothing is delivered again
            answers = Answers(
                pipeline.options.name, one.head_name, checkpoint.epoch, checkpoint.attempt, self._action, rows
            )
            answers.put(pipeline.storage)
            after[sink] = replace(one, answers=checkpoint.attempt)
            if sink in known:
                known[sink] = after[sink]
        entry = LedgerEntry(
            checkpoint=replace(checkpoint, sinks={name: one.to_json() for name, one in known.items()}),
            previous=head.entry,
            previous_checkpoint=head.checkpoint.checksum,
            inputs={},
            staged=staged,
            schema=committed_columns(pipeline),
            schemas=schemas,
            shapes=shapes,
            epoch_time=checkpoint.created_at if pipeline.options.operators else "",
        )
        return entry, after

    def _stage(self, sink: str, files: _Chosen, attempt: str) -> tuple[list[dict[str, Json]], pa.Schema]:
        """Stage the rows of letters, by epoch and row number; returns the files and the columns."""
        numbers = [(file.epoch, file.letters[place].row) for file, places in files.values() for place in places]
        order = sorted(range(len(numbers)), key=lambda index: numbers[index])
        parts = [file.rows.take(pa.array(places, pa.int64())) for file, places in files.values()]
        try:
            rows = pa.concat_tables(parts, promote_options="default").take(pa.array(order, pa.int64()))
        except pa.ArrowInvalid as error:
            epochs = sorted({epoch for epoch, _ in numbers})
            raise ConfigError(
                f"the dead letters of sink {sink!r} have columns of different types: {error}",
                hint=f"Retry them epoch by epoch: firnline dead-letters retry --sink {sink} --epoch {epochs[0]}",
            ) from error
        origins, written = [numbers[index] for index in order], 0
        staged = stage_rows(
            self._pipeline,
            sink,
            attempt,
            rows.combine_chunks().to_batches(),
            outbox_folder(self._pipeline.options.name),
        )
        for file in staged:
            file["letters"] = [list(one) for one in origins[written : written + int(file["rows"])]]
            written += int(file["rows"])
        return staged, rows.schema
