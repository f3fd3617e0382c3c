"""Requests to read input again, judged by the history that the next epoch is planned on.

A request names what its user saw: rows of files in quarantine, or one reading of a file. Since then a rollback may have
undone that epoch, or another request may have dealt with the same records. So each plan judges the open requests again,
by the epochs below its base: those in flight, then the ledger's chain. A file of the quarantine has the attempt of its
epoch in its name, hence a file of an undone or lost epoch is never taken for another one.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain
from typing import TYPE_CHECKING

import pyarrow as pa
import pyarrow.parquet as pq

from firnline.checkpoint.codec import canonical, checksum
from firnline.checkpoint.ledger import Fold, LedgerEntry
from firnline.errors import SourceError
from firnline.names import quarantine_epoch, quarantine_folder
from firnline.run.open_pipeline import OpenPipeline, is_read
from firnline.run.requests import FileRequest
from firnline.sources.base import SourcePlan
from firnline.sources.group import Sources
from firnline.types import EntryRef, Json

if TYPE_CHECKING:  # the commands that use this module import no job
    from firnline.run.progress import EpochInFlight, Progress

READ_SINCE = "the file was read again since, or that reading was rolled back"


@dataclass(frozen=True, slots=True)
class HistoryPart:
    """An epoch, or a fold of many: its input records with source and `epoch`, newest first, and its quarantine."""

    first_epoch: int
    records: list[tuple[str, dict[str, Json]]]
    quarantine: list[dict[str, Json]]

    @classmethod
    def of(cls, link: LedgerEntry | Fold) -> HistoryPart:
        """Return a link of the ledger's chain as a part."""
        if isinstance(link, Fold):
            records = [(source, record) for source, found in link.inputs.items() for record in reversed(found)]
            return cls(link.first_epoch, records, link.quarantine)
        return cls(link.epoch, _with_epoch(link.inputs, link.epoch), link.quarantine)

    @classmethod
    def in_flight(cls, inflight: EpochInFlight) -> HistoryPart:
        """Return an epoch that has run and is not in the ledger yet."""
        records = _with_epoch(inflight.records, inflight.epoch)
        return cls(inflight.epoch, records, inflight.produced.quarantine)


def _with_epoch(inputs: Mapping[str, Sequence[dict[str, Json]]], epoch: int) -> list[tuple[str, dict[str, Json]]]:
    return [(source, {**record, "epoch": epoch}) for source, found in inputs.items() for record in found]


class CurrentNames:
    """The current names of inputs, which old records may name differently."""

    def __init__(self, sources: Sources, positions: Mapping[str, Json]) -> None:
        self._sources, self._positions = sources, positions
        self._found: dict[tuple[str, str], str] = {}

    def find(self, source: str, path: str) -> str:
        """Return the current name of an input; its old one if the spec has no such source."""
        key = (source, path)
        if key not in self._found:
            known = source in self._sources.names and source in self._positions
            found = self._sources[source].current_name(self._positions[source], path) if known else path
            self._found[key] = found
        return self._found[key]


@dataclass(slots=True)
class DealtWith:
    """The quarantined records that epochs have dealt with. Parts are added newest first, before their quarantine."""

    names: CurrentNames
    rows: dict[str, set[int]] = field(default_factory=dict)  # file of the quarantine -> rows read again or discarded
    # Source and current name of an input -> the epoch that began to read it again.
    rereads: dict[tuple[str, str], int] = field(default_factory=dict)

    def add(self, part: HistoryPart) -> None:
        """Add the epochs of a part."""
        for source, record in part.records:
            if record["status"] == "replayed":
                self.rows.setdefault(str(record["quarantine"]), set()).update(expand(record["rows"]))
            elif record.get("reread") and not int(record["from"]) and int(record["to"]):
                key = (source, self.names.find(source, str(record["path"])))
                self.rereads[key] = max(int(record["epoch"]), self.rereads.get(key, 0))

    def has(self, name: str, number: int, source: str, path: str) -> bool:
        """Return whether a row, a record of the input `path`, was dealt with."""
        if number in self.rows.get(name, ()) or not self.rereads:
            return number in self.rows.get(name, ())
        return self.rereads.get((source, self.names.find(source, path)), 0) > quarantine_epoch(name)


def expand(ranges: Iterable[Sequence[int]]) -> Iterator[int]:
    """Yield the row numbers of ranges, both ends included."""
    return chain.from_iterable(range(first, last + 1) for first, last in ranges)


def as_ranges(rows: Iterable[int]) -> list[list[int]]:
    """Return ascending row numbers as ranges, both ends included."""
    ranges: list[list[int]] = []
    for row in rows:
        if ranges and ranges[-1][1] == row - 1:
            ranges[-1][1] = row
        else:
            ranges.append([row, row])
    return ranges


def reading_id(record: Mapping[str, Json]) -> str:
    """Return the name of one reading of an input, from its ledger record with `epoch`: equal for no other reading."""
    return f"{record['epoch']}-{checksum(canonical(record))}"


@dataclass(frozen=True, slots=True)
class Judged:
    """A request as it applies to one base: `request.files` have only the rows that still wait."""

    request: FileRequest
    refused: str = ""  # why a reread no longer applies
    gone: int = 0  # records that no longer wait

    def allows(self, item: Mapping[str, Json]) -> bool:
        """Return whether an input of a plan is what this request still asks for."""
        if "quarantine" not in item:
            return not self.refused
        return any((file["name"], file["rows"]) == (item["quarantine"], item["rows"]) for file in self.request.files)


def is_up_to_date(plan: SourcePlan, judged: Mapping[str, Judged]) -> bool:
    """Return whether a plan reads again only what the requests, by name, ask for as they are judged now."""
    items = (item for split in plan.splits for item in split.inputs if "request" in item)
    return all(item["request"] in judged and judged[item["request"]].allows(item) for item in items)


def _count(request: FileRequest) -> int:
    return sum(int(file["records"]) for file in request.files)


def _find_readings(
    part: HistoryPart, names: CurrentNames, wanted: set[tuple[str, str]], readings: dict[tuple[str, str], str]
) -> None:
    """Add the newest readings of these inputs."""
    for source, record in part.records if wanted else ():
        key = (source, names.find(source, str(record["path"]))) if is_read(record) else ("", "")
        if key in wanted:
            readings.setdefault(key, reading_id(record))


class ReadAgain:
    """Judges requests to read again. Used by the source lane."""

    def __init__(self, pipeline: OpenPipeline, progress: Progress) -> None:
        self._pipeline = pipeline
        self._progress = progress

    def judge(self, requests: Sequence[FileRequest], base: str) -> list[Judged]:
        """Return the requests as they apply to an epoch on `base`, in the order of their names.

        No row is in two of them: a plan that takes some of them takes the first ones.

        Raises:
            LedgerHoleError: the chain is broken.
            SourceError: a file of the quarantine cannot be read now.
        """
        if not requests:
            return []
        names = {str(file["name"]) for request in requests for file in request.files}
        wanted = {(request.source, request.path) for request in requests if request.reading}
        dealt = DealtWith(CurrentNames(self._pipeline.sources, self._progress.bases[base].positions))
        quarantined, readings = set[str](), dict[tuple[str, str], str]()
        epochs = [quarantine_epoch(name) for name in names]
        epochs += [int(request.reading.partition("-")[0]) for request in requests if request.reading]
        for part in self._walk(base) if epochs else ():
            dealt.add(part)
            quarantined |= names.intersection(str(file["name"]) for file in part.quarantine)
            _find_readings(part, dealt.names, wanted - readings.keys(), readings)
            if (quarantined == names and wanted == readings.keys()) or part.first_epoch < min(epochs):
                break
        judged = []
        for request in sorted(requests, key=lambda one: one.id):
            if request.kind == "replay":
                waiting = self._waiting(request, dealt, quarantined)
                judged.append(Judged(waiting, gone=_count(request) - _count(waiting)))
            else:
                known = readings.get((request.source, request.path), "")
                judged.append(Judged(request, READ_SINCE if request.reading and request.reading != known else ""))
        return judged

    def _walk(self, base: str) -> Iterator[HistoryPart]:
        """Yield the history below a base, newest first."""
        unstaged, tip = self._split(base)
        yield from map(HistoryPart.in_flight, unstaged)
        yield from map(HistoryPart.of, self._pipeline.ledger.chain(tip))

    def _split(self, base: str) -> tuple[list[EpochInFlight], EntryRef | None]:
        """Return the epochs below a base that are not in the ledger yet, and the entry below them."""
        unstaged: list[EpochInFlight] = []
        attempt = base
        while True:
            known = self._progress.bases.get(attempt)
            if known is None:  # decided meanwhile: the epochs above it are in the ledger by now
                unstaged, attempt = [], base
                continue
            inflight = self._progress.epochs.get(attempt) if known.entry is None else None
            if inflight is None:
                return unstaged, known.entry
            unstaged.append(inflight)
            attempt = inflight.base

    def _waiting(self, request: FileRequest, dealt: DealtWith, quarantined: set[str]) -> FileRequest:
        """Return a replay with the rows that still wait; the next request does not get them."""
        files = []
        for file in request.files:
            name, asked = str(file["name"]), set(expand(file["rows"]))
            rows = sorted(asked - dealt.rows.get(name, set())) if name in quarantined else []
            if rows and any(epoch > quarantine_epoch(name) for epoch in dealt.rereads.values()):
                paths = self._load_paths(name)
                rows = [
                    row for row in rows if row >= len(paths) or not dealt.has(name, row, request.source, paths[row])
                ]
            dealt.rows.setdefault(name, set()).update(rows)
            size = int(file["size_bytes"]) * len(rows) // max(1, len(asked))
            files.append({**file, "rows": as_ranges(rows), "records": len(rows), "size_bytes": size})
        return replace(request, files=tuple(files))

    def _load_paths(self, name: str) -> list[str]:
        """Return the input of every row of a file in quarantine; none if it is lost, which its reader finds, too."""
        try:
            data = self._pipeline.storage.get(f"{quarantine_folder(self._pipeline.options.name)}/{name}")
            paths: list[str] = pq.read_table(pa.BufferReader(data), columns=["file"]).column("file").to_pylist()
        except (FileNotFoundError, pa.ArrowException):
            return []
        except OSError as error:
            raise SourceError(f"cannot read the quarantine file {name}: {error}") from error
        return paths
