"""Finds damage in a ledger, intact copies of the damaged parts, and where the history continues behind a hole."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from firnline.checkpoint.codec import checksum, parse, unseal
from firnline.checkpoint.ledger import (
    Fold,
    LedgerCopy,
    LedgerEntry,
    bridges_of,
    find_copy,
)
from firnline.errors import DamagedError, LedgerHoleError
from firnline.graph import sink_input
from firnline.history.savepoints.pins import load_pins
from firnline.names import LEDGER, entry_name, ledger_folder
from firnline.run.open_pipeline import OpenPipeline
from firnline.sources.columns import LINEAGE
from firnline.storage import Storage, open_storage
from firnline.types import EntryRef, Json

CREATED = -1  # this pipeline created the table, so nothing came before
GOES_ON = ("epoch", "rescale", "import", "repair")  # kinds whose entry follows that of the previous epoch


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
            told = {entry.epoch: _Logged(str(info["kind"]), entry.name, entry.checksum, _to_epoch(info), previous)}
            for unit in info.get("units") or []:
                epoch = int(unit["epoch"])
                told.setdefault(epoch, _Logged("epoch", entry_name(epoch, str(unit["attempt"])), "", -1))
        except (KeyError, TypeError, ValueError):
            continue
        for epoch, logged in told.items():
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
        yield open_storage(root, pipeline.options.deciding.storage_options), [LEDGER, "", ledger_folder(name)]


def find_with_rows(pipeline: OpenPipeline, source: str, position: Json) -> frozenset[str]:
    """Return the files of a source with rows in a table whose rows name their file (`lineage: true`)."""
    found: set[str] = set()
    for sink, options in zip(pipeline.sinks, pipeline.options.ordered_sinks, strict=True):
        if sink_input(pipeline.options, options) == source:
            found |= sink.find_values(LINEAGE[0])
    return frozenset(pipeline.sources[source].current_name(position, path) for path in found)
