"""Repairs a ledger with a missing or damaged file, so that late files can be distinguished from processed ones again.

The survey finds the damage, intact copies of the damaged parts, and where the history continues behind a hole. Files
that a copy proves are restored byte for byte. For the rest, a repair is a separate epoch, in a new generation, that
reads nothing. It names the damaged link, where the history continues behind it, and which files count as processed. The
repair derives all of that under the claim from intact data: the ledger, the table's log, the lineage of rows, and a
full listing of the sources. The user decides about the remaining files by name.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase

from firnline.checkpoint.codec import checksum, parse, unseal
from firnline.checkpoint.ledger import (
    Fold,
    LedgerCopy,
    LedgerEntry,
    bridges_of,
    find_copy,
)
from firnline.errors import CheckpointError, ConfigError, DamagedError, LedgerHoleError, SinkError
from firnline.graph import find_source, sink_input
from firnline.history.savepoints.pins import load_pins
from firnline.history.store import on_record
from firnline.names import LEDGER, entry_name, ledger_folder
from firnline.options import LINEAGE
from firnline.run.edits import perform_edit
from firnline.run.joining import ahead_of, committed_columns, edit_checkpoint
from firnline.run.open_pipeline import OpenPipeline
from firnline.sinks.base import Head
from firnline.sources.base import processed_record
from firnline.sources.known import KnownFiles
from firnline.storage import FileStat, Storage, open_storage
from firnline.types import EntryRef, Json, Receipt

CREATED = -1  # this pipeline created the table, so nothing came before
GOES_ON = ("epoch", "rescale", "import", "repair", "position")  # kinds whose entry follows that of the previous epoch


@dataclass(frozen=True, slots=True)
class Hole:
    """A broken link of the ledger, and its replacement."""

    entry: EntryRef
    problem: str
    copy: str | None  # the location of an intact copy
    goes_on_at: int | None  # the newest provable epoch below, 0 where the history starts; None: nothing is provable
    files_known: bool  # whether the files of the entry are known anyway
    how: str


@dataclass(slots=True)
class Survey:
    """What the ledger holds in spite of its holes."""

    known: dict[str, set[str]] = field(default_factory=dict)  # by source: files in intact links
    salvaged: dict[str, list[dict[str, Json]]] = field(default_factory=dict)  # files in damaged entries
    named: dict[str, dict[str, str]] = field(default_factory=dict)  # files named in an intact, unproven file
    holes: list[Hole] = field(default_factory=list)
    copies: list[LedgerCopy] = field(default_factory=list)
    bridges: dict[EntryRef, EntryRef | None] = field(default_factory=dict)  # holes that no copy closes

    @property
    def is_complete(self) -> bool:
        """Whether every file that was ever processed is known. Then all others are late."""
        return all(hole.files_known and hole.goes_on_at is not None for hole in self.holes)


def survey(pipeline: OpenPipeline, tip: EntryRef, copies: Sequence[str]) -> Survey:
    """Walk the whole history across every hole."""
    return _Surveyor(pipeline, copies).walk(tip)


@dataclass(frozen=True, slots=True)
class _Logged:
    """The log's record of an epoch: its kind, and the name of its entry."""

    kind: str
    name: str
    checksum: str  # empty if it was committed together with later ones
    to_epoch: int
    previous: EntryRef | None = None  # the previous entry, if the commit names one


class _Surveyor:
    def __init__(self, pipeline: OpenPipeline, copies: Sequence[str]) -> None:
        self._pipeline = pipeline
        self._ledger = pipeline.ledger
        self._places = list(_places(pipeline, copies))
        self._found = Survey(known={name: set() for name in pipeline.sources.names})
        self._timeline: dict[int, _Logged] | None = None
        self._saved: set[EntryRef] = set()  # damaged entries with an intact list of files

    def walk(self, tip: EntryRef) -> Survey:
        ref: EntryRef | None = tip
        bridged: dict[EntryRef, EntryRef | None] = {}
        while ref is not None:
            at: EntryRef | None = ref
            try:
                for link in self._ledger.chain(ref, bridged):
                    self._take(link)
                    bridged |= bridges_of(link)
                    at = link.previous
                return self._found
            except LedgerHoleError as error:
                assert at is not None
                ref = self._over(at, error.message)
        return self._found

    def _take(self, link: LedgerEntry | Fold) -> None:
        for source, records in link.inputs.items():
            self._found.known.setdefault(source, set()).update(str(record["path"]) for record in records)

    def _over(self, ref: EntryRef, problem: str) -> EntryRef | None:
        """Record a hole. Returns the link where the history continues."""
        found = self._found
        for storage, folders in self._places:
            copy = find_copy(ref, storage, folders)
            if copy is not None:
                found.copies.append(copy)
                self._take(copy.link)
                before = copy.link.previous
                below = before.epoch if before else 0
                found.holes.append(Hole(ref, problem, copy.place, below, files_known=True, how="a copy is intact"))
                return before
        to, begins, how = self._find_next(ref)
        found.bridges[ref] = to
        at = to.epoch if to else 0 if begins else None
        found.holes.append(Hole(ref, problem, None, at, ref in self._saved, how))
        if to is None and not begins:
            for name, link in self._ledger.readable_before(ref.epoch + 1):
                for source, records in link.inputs.items():
                    named = found.named.setdefault(source, {})
                    for record in records:
                        named.setdefault(str(record["path"]), name)
        return to

    def _find_next(self, ref: EntryRef) -> tuple[EntryRef | None, bool, str]:
        """Find where the history continues behind a damaged link, whether it starts there, and how that is known."""
        previous, begins = self._salvage(ref)
        if begins:
            return None, True, "what is left of the entry says that it is the first"
        if previous is not None and self._ledger.find(previous) is not None:
            return previous, False, "what is left of the entry names the one before"
        at: EntryRef | None = ref
        while at is not None:
            at, begins = self._logged_before(at)
            if begins:
                return None, True, "the table's log names everything down to the beginning"
            if at is not None and self._ledger.find(at) is not None:
                return at, False, "the table's log names the entry before"
        return None, False, "neither the entry nor the table's log tells what came before"

    def _salvage(self, ref: EntryRef) -> tuple[EntryRef | None, bool]:
        """Keep the inputs of a damaged entry, which have their own checksum.

        Returns the previous entry that it names, and whether it says that there is none.
        """
        data = self._ledger.read_raw(ref.name)
        if data is None:
            return None, False
        what = f"ledger entry {ref.name}"
        try:
            body = parse(data, what)
            inputs = unseal(body["inputs"], what)["sources"]
            previous = EntryRef.from_json(body["previous"]) if body["previous"] is not None else None
        except (DamagedError, KeyError, TypeError, ValueError):
            return None, False
        for source, records in inputs.items():
            self._found.salvaged.setdefault(source, []).extend(records)
        self._saved.add(ref)
        return previous, previous is None

    def _logged_before(self, ref: EntryRef) -> tuple[EntryRef | None, bool]:
        """Return the previous entry according to the log, and whether there is none because the history starts
        there."""
        if self._timeline is None:
            self._timeline = dict(_read_timeline(self._pipeline))
        logged = self._timeline.get(ref.epoch)
        if logged is None or logged.name != ref.name:
            return None, False
        if logged.previous is not None:
            return logged.previous, False
        if logged.kind == "fresh" or ((ref.epoch, logged.kind) == (1, "epoch") and CREATED in self._timeline):
            return None, True
        epoch = ref.epoch - 1 if logged.kind in GOES_ON else logged.to_epoch
        before = self._timeline.get(epoch)
        if before is None or not 0 < epoch < ref.epoch:
            return None, False
        digest = before.checksum
        if not digest:
            data = self._ledger.read_raw(before.name)
            digest = checksum(data) if data is not None else ""
        return EntryRef(epoch, before.name, digest), False


def _read_timeline(pipeline: OpenPipeline) -> Iterator[tuple[int, _Logged]]:
    """Yield the epochs in the log of the deciding table, newest first, and `CREATED` if the log has the creation."""
    seen: set[int] = set()
    for commit in pipeline.deciding.read_log():
        info = commit.info
        if info.get("kind") == "create":
            yield CREATED, _Logged("create", "", "", -1)
        if "checkpoint" not in info:
            continue
        try:
            entry = EntryRef.from_json(info["entry"])
            previous = EntryRef.from_json(info["previous"]) if info.get("previous") else None
            epochs = {entry.epoch: _Logged(str(info["kind"]), entry.name, entry.checksum, _to_epoch(info), previous)}
            for unit in info.get("units") or []:
                epoch = int(unit["epoch"])
                epochs.setdefault(epoch, _Logged("epoch", entry_name(epoch, str(unit["attempt"])), "", -1))
        except (KeyError, TypeError, ValueError):
            continue
        for epoch, logged in epochs.items():
            if epoch not in seen:
                seen.add(epoch)
                yield epoch, logged


def _to_epoch(info: dict[str, Json]) -> int:
    return int((info.get("jump") or {}).get("to_epoch", -1)) if info["kind"] == "rollback" else -1


def _places(pipeline: OpenPipeline, copies: Sequence[str]) -> Iterator[tuple[Storage, list[str]]]:
    """Yield the places that may have copies of the ledger's files: the pipeline's savepoints, and those the user
    names."""
    name = pipeline.options.name
    roots = [*copies, *(pin.path for pin in reversed(load_pins(pipeline.storage, name)))]
    for root in dict.fromkeys(roots):
        yield open_storage(root, pipeline.options.home.storage_options), [LEDGER, "", ledger_folder(name)]


def find_with_rows(pipeline: OpenPipeline, source: str, position: Json) -> frozenset[str]:
    """Return the files of a source with rows in a table whose rows name their file (`lineage: true`)."""
    found: set[str] = set()
    for sink, options in zip(pipeline.sinks, pipeline.options.ordered_sinks, strict=True):
        if options is pipeline.options.journal:
            continue
        read = find_source(pipeline.options, sink_input(pipeline.options, options))
        if read is not None and read[0].name == source:
            found |= sink.find_values(LINEAGE[0])
    return frozenset(pipeline.sources[source].current_name(position, path) for path in found)


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
class _Current:
    plan: RepairPlan
    head: Head
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
        return self._read_current().plan

    def perform(self, run: str, report: Callable[[str], None] = lambda _: None) -> tuple[RepairPlan, Receipt | None]:
        """Repair the ledger. Returns the performed plan, and a receipt unless copies sufficed.

        Raises:
            ConfigError: there are undecided files; nothing was changed.
            LedgerHoleError: a required sink lacks epochs that no copy has any more; nothing was changed.
            CheckpointError: files appeared or disappeared since the plan; only the generation was changed.
            FencedError: another run took over meanwhile.
        """
        first = self._read_current()
        first.plan.check()
        reads = [first]

        def decide(generation: int) -> tuple[LedgerEntry, Head]:
            found = self._read_current()
            if found.plan.files != first.plan.files:
                raise CheckpointError(
                    "files came or went since they were decided about",
                    hint="Look at the plan again: firnline ledger repair",
                )
            reads.append(found)
            return self._entry(found, run, generation), found.head

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
                report(f"{copy.name} put back from {copy.place}")
            if first.plan.new_epoch is None:
                return first.plan, None
            receipt = perform_edit(self._pipeline, run, decide, report, goes_on_from=first.head.entry)
        return replace(reads[-1].plan, holes=first.plan.holes), receipt

    # -- reading --------------------------------------------------------------------------------------

    def _read_current(self) -> _Current:
        pipeline = self._pipeline
        head, committed = pipeline.deciding.load(), pipeline.deciding.load_committed()
        if head.checkpoint is None or head.entry is None:
            raise ConfigError(f"pipeline {pipeline.options.name!r} has no ledger yet", hint="`firnline run` makes it.")
        if committed.epoch != head.epoch:
            raise CheckpointError(
                f"{pipeline.deciding.name} is at epoch {committed.epoch}; those up to {head.epoch} wait for a "
                "committer",
                hint="Commit them first: firnline committer --once",
            )
        found = survey(pipeline, head.entry, self._copies)
        files, records = self._sort_files(head, found) if found.bridges else ([], {})
        plan = RepairPlan(
            pipeline=pipeline.options.name,
            epoch=head.epoch,
            new_epoch=head.epoch + 1 if found.bridges else None,
            holes=found.holes,
            known=sum(len(paths) for paths in found.known.values()),
            files=files,
            sinks_behind=self._find_behind(head.entry, found),
        )
        return _Current(plan, head, found, records)

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

    def _sort_files(self, head: Head, found: Survey) -> tuple[list[RepairFile], dict[str, list[dict[str, Json]]]]:
        """Classify every file that could be late, and return the content of the repair's entry."""
        assert head.checkpoint is not None
        files: list[RepairFile] = []
        records = {name: list(salvaged) for name, salvaged in found.salvaged.items()}
        for source in self._pipeline.sources:
            position = head.checkpoint.positions.get(source.name)
            if position is None:
                continue
            known = KnownFiles((path, "") for path in found.known.get(source.name, ()))
            for record in found.salvaged.get(source.name, []):
                known.add(str(record["path"]), "")
            late = source.find_late(position, known).late
            with_rows = find_with_rows(self._pipeline, source.name, position) if late else frozenset()
            for stat in late:
                taken_as, how = self._judge(stat, source.name, found, with_rows, head.checkpoint.created_at)
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
        if fits_any(stat.name, self._new):
            return "new", f"you say so; {hint}"
        if fits_any(stat.name, self._processed):
            return "processed", f"you say so; {hint}"
        return "unknown", hint

    def _entry(self, current: _Current, run: str, generation: int) -> LedgerEntry:
        base = current.head.checkpoint
        assert base is not None
        checkpoint = edit_checkpoint(
            self._pipeline, base, base, epoch=current.head.epoch + 1, generation=generation, run=run
        )
        taken = Counter(file.taken_as for file in current.plan.files)
        return LedgerEntry(
            checkpoint=checkpoint,
            previous=current.head.entry,
            previous_checkpoint=base.checksum,
            inputs=current.records,
            schema=committed_columns(self._pipeline),
            kind="repair",
            onto=current.head.entry,
            edit={
                "to_epoch": current.head.epoch,
                "bridges": [
                    {"over": over.to_json(), "to": to.to_json() if to else None}
                    for over, to in current.found.bridges.items()
                ],
                "files_processed": taken["processed"],
                "files_new": taken["new"],
            },
        )


def fits_any(path: str, patterns: Sequence[str]) -> bool:
    """Return whether a path is one of these names, or matches one of these patterns."""
    return any(path == pattern or fnmatchcase(path, pattern) for pattern in patterns)
