"""Repairs a ledger with a missing or damaged file, so that late files can be distinguished from processed ones again.

Files that a copy proves are restored byte for byte. For the rest, a repair is a separate epoch, in a new generation,
that reads nothing. It names the damaged link, where the history continues behind it, and which files count as
processed. The repair derives all of that under the claim from intact data: the ledger, the table's log, the lineage of
rows, and a full listing of the sources. The user decides about the remaining files by name.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase

from firnline.checkpoint.ledger import LedgerEntry
from firnline.errors import CheckpointError, ConfigError, LedgerHoleError, SinkError
from firnline.history.auditing import on_record
from firnline.history.edits.ledger_holes import Hole, Survey, find_with_rows, survey
from firnline.run.edit_entries import committed_columns, edit_checkpoint
from firnline.run.joining import ahead_of, perform_edit
from firnline.run.open_pipeline import OpenPipeline
from firnline.sinks.base import Head
from firnline.sources.base import processed_record
from firnline.sources.known import KnownFiles
from firnline.storage import FileStat
from firnline.types import EntryRef, Json, Receipt

NAMED = 3  # examples in a message


@dataclass(frozen=True, slots=True)
class RepairFile:
    """A file at or below the high-water mark that the intact ledger does not have, and how the repair treats it."""

    source: str
    path: str
    size_bytes: int
    create_time: str
    taken_as: str  # processed, new, or unknown: then the user must decide
    how: str  # how that is known, or the evidence for it


@dataclass(frozen=True, slots=True)
class SinkBehind:
    """A sink that lacks epochs which no copy has any more. The repair leaves the sink unchanged, and it stays
    behind."""

    sink: str
    epoch: int  # its newest epoch
    required: bool
    reason: str
    hint: str


@dataclass(frozen=True, slots=True)
class RepairPlan:
    """The plan of a repair, made at one version of the deciding table."""

    pipeline: str
    epoch: int
    new_epoch: int | None  # None if copies suffice, or nothing is damaged
    holes: list[Hole]
    known: int  # files in the intact part of the ledger
    files: list[RepairFile] = field(default_factory=list)
    sinks_behind: list[SinkBehind] = field(default_factory=list)

    def count(self, taken_as: str) -> int:
        return sum(1 for file in self.files if file.taken_as == taken_as)

    def check(self) -> None:
        """Check whether the repair is possible.

        Raises:
            LedgerHoleError: a required sink would stay behind, and every later run would stop at it.
            ConfigError: there are undecided files.
        """
        for behind in self.sinks_behind:
            if behind.required:
                hint = f"{behind.hint} Then repair."
                raise LedgerHoleError(behind.reason, hint=hint, sink=behind.sink, epoch=behind.epoch)
        unknown = [file.path for file in self.files if file.taken_as == "unknown"]
        if not unknown:
            return
        more = f" and {len(unknown) - NAMED:,} more" if len(unknown) > NAMED else ""
        raise ConfigError(
            f"nothing tells whether these were processed: {', '.join(unknown[:NAMED])}{more}",
            hint="Decide by name or pattern: --assume-processed PATTERN for those whose rows are in the table, "
            "--assume-new PATTERN for those to be read; '*' means all that are left.",
            files=len(unknown),
        )


@dataclass(frozen=True, slots=True)
class _Look:
    plan: RepairPlan
    held: Head
    found: Survey
    records: dict[str, list[dict[str, Json]]]  # the files in the repair's entry, by source


class LedgerRepair:
    """One repair: `plan` is read-only, `perform` does it.

    Args:
        copies: Folders or URIs that may have copies of the ledger's files, beside the pipeline's savepoints.
        processed: Patterns of files to treat as processed without evidence.
        new: Patterns of files to read without evidence; this one wins if both match.
    """

    def __init__(
        self,
        pipeline: OpenPipeline,
        *,
        copies: Sequence[str] = (),
        processed: Sequence[str] = (),
        new: Sequence[str] = (),
    ) -> None:
        self._pipeline = pipeline
        self._copies = list(copies)
        self._processed = list(processed)
        self._new = list(new)

    def plan(self) -> RepairPlan:
        """Return what the repair would do. Read-only: claims and writes nothing."""
        return self._look().plan

    def perform(self, run: str, tell: Callable[[str], None] = lambda _: None) -> tuple[RepairPlan, Receipt | None]:
        """Repair the ledger. Returns the performed plan, and a receipt unless copies sufficed.

        Raises:
            ConfigError: there are undecided files; nothing was changed.
            LedgerHoleError: a required sink lacks epochs that no copy has any more; nothing was changed.
            CheckpointError: files appeared or disappeared since the plan; only the generation was changed.
            FencedError: another run took over meanwhile.
        """
        first = self._look()
        first.plan.check()
        looks = [first]

        def look(generation: int) -> tuple[LedgerEntry, Head]:
            found = self._look()
            if found.plan.files != first.plan.files:
                raise CheckpointError(
                    "files came or went since they were decided about",
                    hint="Look at the plan again: firnline ledger repair",
                )
            looks.append(found)
            return self._entry(found, run, generation), found.held

        facts = {
            "holes": [hole.entry.name for hole in first.plan.holes],
            "assume_processed": self._processed,
            "assume_new": self._new,
            **{f"files_{word}": first.plan.count(word) for word in ("processed", "new")},
            "sinks_behind": [behind.sink for behind in first.plan.sinks_behind],
        }
        with on_record(self._pipeline, "ledger-repair", run, from_epoch=first.plan.epoch, to_epoch=None, **facts):
            for copy in first.found.copies:
                self._pipeline.ledger.put_back(copy)
                tell(f"{copy.name} put back from {copy.place}")
            if first.plan.new_epoch is None:
                return first.plan, None
            receipt = perform_edit(self._pipeline, run, look, tell, goes_on_from=first.held.entry)
        return replace(looks[-1].plan, holes=first.plan.holes), receipt

    # -- looking --------------------------------------------------------------------------------------

    def _look(self) -> _Look:
        pipeline = self._pipeline
        held, committed = pipeline.deciding.load(), pipeline.deciding.load_committed()
        if held.checkpoint is None or held.entry is None:
            raise ConfigError(f"pipeline {pipeline.options.name!r} has no ledger yet", hint="`firnline run` makes it.")
        if committed.epoch != held.epoch:
            raise CheckpointError(
                f"{pipeline.deciding.name} stands at epoch {committed.epoch}; those up to {held.epoch} wait for a "
                "committer",
                hint="Commit them first: firnline committer --once",
            )
        found = survey(pipeline, held.entry, self._copies)
        files, records = self._sort_files(held, found) if found.bridges else ([], {})
        plan = RepairPlan(
            pipeline=pipeline.options.name,
            epoch=held.epoch,
            new_epoch=held.epoch + 1 if found.bridges else None,
            holes=found.holes,
            known=sum(len(paths) for paths in found.known.values()),
            files=files,
            sinks_behind=self._find_behind(held.entry, found),
        )
        return _Look(plan, held, found, records)

    def _find_behind(self, tip: EntryRef, found: Survey) -> list[SinkBehind]:
        """Return the further sinks that lack an epoch at or below a hole that no copy closes."""
        behind = []
        for sink in self._pipeline.sinks[1:]:
            try:
                epoch = sink.load().epoch
            except (SinkError, OSError):
                continue  # whether the repair is possible without it is checked under the claim
            if not any(over.epoch > epoch for over in found.bridges):
                continue
            try:
                ahead_of(self._pipeline, tip, epoch, sink.name)
            except LedgerHoleError as error:
                behind.append(SinkBehind(sink.name, epoch, sink.required, error.message, error.hint))
        return behind

    def _sort_files(self, held: Head, found: Survey) -> tuple[list[RepairFile], dict[str, list[dict[str, Json]]]]:
        """Classify every file that could be late, and return the content of the repair's entry."""
        assert held.checkpoint is not None
        files: list[RepairFile] = []
        records = {name: list(salvaged) for name, salvaged in found.salvaged.items()}
        for source in self._pipeline.sources:
            position = held.checkpoint.positions.get(source.name)
            if position is None:
                continue
            known = KnownFiles((path, "") for path in found.known.get(source.name, ()))
            for record in found.salvaged.get(source.name, []):
                known.add(str(record["path"]), "")
            late = source.find_late(position, known).late
            with_rows = find_with_rows(self._pipeline, source.name, position) if late else frozenset()
            for stat in late:
                taken_as, how = self._judge(stat, source.name, found, with_rows, held.checkpoint.created_at)
                files.append(
                    RepairFile(source.name, stat.name, stat.size_bytes, stat.modified_at.isoformat(), taken_as, how)
                )
                if taken_as == "processed":
                    records.setdefault(source.name, []).append({**processed_record(stat), "how": how})
        return files, records

    def _judge(
        self, stat: FileStat, source: str, found: Survey, with_rows: frozenset[str], newest: str
    ) -> tuple[str, str]:
        """Return how to treat a file, and how that is known."""
        if found.is_complete:
            return "new", "the list of processed files is complete without what is damaged"
        if stat.name in with_rows:
            return "processed", "its rows are in the table"
        named = found.named.get(source, {}).get(stat.name)
        hint = "nothing tells"
        if named:
            hint = f"{named} names it, but nothing proves that it is part of the history"
        elif stat.modified_at.isoformat() > newest:
            hint = f"changed after the newest epoch was made ({newest})"
        if _fits(stat.name, self._new):
            return "new", f"you say so; {hint}"
        if _fits(stat.name, self._processed):
            return "processed", f"you say so; {hint}"
        return "unknown", hint

    def _entry(self, look: _Look, run: str, generation: int) -> LedgerEntry:
        base = look.held.checkpoint
        assert base is not None
        checkpoint = edit_checkpoint(
            self._pipeline, base, base, epoch=look.held.epoch + 1, generation=generation, run=run
        )
        taken = Counter(file.taken_as for file in look.plan.files)
        return LedgerEntry(
            checkpoint=checkpoint,
            previous=look.held.entry,
            previous_checkpoint=base.checksum,
            inputs=look.records,
            schema=committed_columns(self._pipeline),
            kind="repair",
            onto=look.held.entry,
            jump={
                "to_epoch": look.held.epoch,
                "bridges": [
                    {"over": over.to_json(), "to": to.to_json() if to else None}
                    for over, to in look.found.bridges.items()
                ],
                "files_processed": taken["processed"],
                "files_new": taken["new"],
            },
        )


def _fits(path: str, patterns: Sequence[str]) -> bool:
    return any(path == pattern or fnmatchcase(path, pattern) for pattern in patterns)
