"""The quarantine of a pipeline: bad records that no later epoch has dealt with, and those of an epoch that failed."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from datetime import datetime
from posixpath import dirname

import pyarrow as pa
import pyarrow.parquet as pq

from firnline.names import quarantine_folder
from firnline.run.open_pipeline import OpenPipeline
from firnline.run.read_again import CurrentNames, DealtWith, HistoryPart, as_ranges
from firnline.sources.headers import find_headers
from firnline.types import Json


@dataclass(frozen=True, slots=True)
class QuarantineFile:
    """The records of one file of the quarantine that still wait, with their row numbers in it."""

    name: str
    source: str
    rows: list[tuple[int, dict[str, Json]]]
    headers: frozenset[str] = frozenset()  # the inputs whose headers are in the file

    def describe(self, rows: list[int]) -> dict[str, Json]:
        """Return what a request says of some of these rows."""
        chosen = set(rows)
        wanted = [row for number, row in self.rows if number in chosen]
        return {
            "name": self.name,
            "rows": as_ranges(rows),
            "records": len(wanted),
            "size_bytes": sum(len(row["raw"]) for row in wanted),
            "folders": sorted({dirname(str(row["file"])) for row in wanted}),
        }


def load_quarantine(pipeline: OpenPipeline) -> Iterator[dict[str, Json]]:
    """Yield bad records of committed epochs, newest epoch first, without those that were read again or discarded."""
    return (row for file in load_quarantine_files(pipeline) for _, row in file.rows)


def load_quarantine_files(pipeline: OpenPipeline) -> Iterator[QuarantineFile]:
    """Yield the files in the ledger entries of commits, newest first.

    Left out are records that a later epoch has read again, or that were discarded: the ledger names them. So a rollback
    of that epoch brings them back. Of a file that was read again, only the records of the last reading count.
    """
    head = pipeline.load()
    positions = head.checkpoint.positions if head.checkpoint is not None else {}
    dealt = DealtWith(CurrentNames(pipeline.sources, positions))
    for link in pipeline.ledger.chain(head.entry):
        dealt.add(HistoryPart.of(link))
        for file in link.quarantine:
            name = str(file["name"])
            table = _read(pipeline, name)
            rows = list(enumerate(table.to_pylist()))
            source = str(file.get("source") or _find_source(pipeline, rows[0][1]))
            kept = [(number, row) for number, row in rows if not dealt.has(name, number, source, str(row["file"]))]
            if kept:
                yield QuarantineFile(name, source, kept, frozenset(find_headers(table.schema)))


def load_pending(pipeline: OpenPipeline) -> list[dict[str, Json]]:
    """Return the bad records of the newest attempt at an epoch that is not committed: it runs now, or it failed."""
    newest = pipeline.load().epoch
    attempts: dict[str, list[str]] = {}
    times: dict[str, datetime] = {}
    for stat in pipeline.storage.list(quarantine_folder(pipeline.options.name)):
        name = stat.name.rsplit("/", 1)[-1]
        epoch, _, rest = name.partition("-")
        if epoch.isdigit() and int(epoch) > newest and name.endswith(".parquet"):
            attempt = rest.partition("-")[0]
            attempts.setdefault(attempt, []).append(name)
            times[attempt] = max(stat.modified_at, times.get(attempt, stat.modified_at))
    if not attempts:
        return []
    last = max(times, key=lambda attempt: times[attempt])
    # A task whose columns changed has read its files twice.
    found = {(row["file"], row["record"]): row for name in attempts[last] for row in _read(pipeline, name).to_pylist()}
    return [found[key] for key in sorted(found)]


def _read(pipeline: OpenPipeline, name: str) -> pa.Table:
    data = pipeline.storage.get(f"{quarantine_folder(pipeline.options.name)}/{name}")
    return pq.ParquetFile(pa.BufferReader(data)).read()


def _find_source(pipeline: OpenPipeline, row: Mapping[str, Json]) -> str:
    """Return the source of a record whose file of the quarantine does not name it."""
    found = [source.name for source in pipeline.sources if str(row["file"]).startswith(f"{source.location}/")]
    return found[0] if found else pipeline.sources.names[0]
