"""A pipeline over sinks that are no Delta tables: run, jobs and history edits need the contract alone."""

from __future__ import annotations

import sys
from collections import Counter
from dataclasses import dataclass, replace
from pathlib import Path
from types import ModuleType
from typing import Any, ClassVar

import pyarrow as pa
import pytest

from firnline.checkpoint.codec import short_number
from firnline.errors import CommitConflictError, FencedError, RollbackRefusedError
from firnline.history.edits.fresh_start import start_over
from firnline.history.edits.rollback import Rollback
from firnline.history.epoch import load_epoch
from firnline.history.status import load_status
from firnline.options import DeltaSinkOptions, PipelineOptions
from firnline.run.open_pipeline import open_pipeline
from firnline.sinks import registry
from firnline.sinks.base import (
    Capabilities,
    Decided,
    Effect,
    EpochCommit,
    Head,
    KeepRows,
    RunTasks,
    Sink,
    SinkContext,
    Stager,
)
from firnline.types import Delivery, EntryRef, Json, Receipt
from tests.support.pipelines import MakeOptions, run_to_end
from tests.support.samples import SampleInput, table_ids


@dataclass
class Shelf:
    """What one sink holds, in this process."""

    head: Head
    rows: list[dict[str, Any]]
    schema: pa.Schema
    receipts: dict[int, Receipt]


SHELVES: dict[str, Shelf] = {}


@dataclass(frozen=True, slots=True)
class ShelfOptions(DeltaSinkOptions):
    """Options of a shelf; `table` is where a deciding one keeps the ledger."""

    type: ClassVar[str] = "shelf"


class ShelfSink(Sink):
    """Rows in memory, committed together with the checkpoint; they never go away again."""

    capabilities: ClassVar[Capabilities] = Capabilities(Delivery.EXACTLY_ONCE, decides=True)

    def __init__(self, options: DeltaSinkOptions, context: SinkContext) -> None:
        self.name, self.required, self.uri = options.name, options.required, f"shelf:{options.name}"
        self._generation = 0

    @property
    def _shelf(self) -> Shelf:
        empty = Shelf(Head(exists=False, version=-1), [], pa.schema([]), {})
        return SHELVES.setdefault(self.name, empty)

    def load(self) -> Head:
        return self._shelf.head

    def claim(
        self,
        run: str,
        generation: int | None = None,
        baseline: EntryRef | None = None,
        onto: int | None = None,
        *,
        again: bool = False,
        decided: Decided | None = None,
    ) -> Head:
        head = self._shelf.head
        if generation is not None and head.generation > generation:
            raise FencedError(f"{self.name} is held by generation {head.generation}")
        self._generation = generation or head.generation + 1
        self._shelf.head = replace(head, exists=True, version=head.version + 1, generation=self._generation)
        return self._shelf.head

    def stage_target(self) -> dict[str, Json]:
        return {"type": "shelf", "sink": self.name, "partition_by": []}

    def commit(self, commit: EpochCommit, run_tasks: RunTasks | None = None) -> Receipt:
        return self._put(commit, commit.previous, commit.files)

    def edit(self, commit: EpochCommit, effect: Effect, onto: EntryRef | None, version: int | None = None) -> Receipt:
        if not isinstance(effect, KeepRows):
            raise self._no_way_back()
        if version is not None and version != self._shelf.head.version:
            raise CommitConflictError("the shelf moved")
        return self._put(commit, onto, [])

    def _put(self, commit: EpochCommit, onto: EntryRef | None, files: list[dict[str, Json]]) -> Receipt:
        shelf, checkpoint = self._shelf, commit.checkpoint
        known = shelf.receipts.get(checkpoint.epoch)
        if known is not None and known.attempt == checkpoint.attempt:
            return known
        digest = short_number(onto.checksum) if onto is not None else None
        fence = self.read_fence()
        if (fence.generation, fence.epoch, fence.digest) != (self._generation, onto.epoch if onto else 0, digest):
            raise FencedError(f"{self.name} stands elsewhere")
        shelf.rows += [row for file in files for row in file["held"]]
        shelf.schema = pa.unify_schemas([shelf.schema, commit.schema])
        receipt = Receipt(
            sink=self.name,
            epoch=checkpoint.epoch,
            generation=checkpoint.generation,
            run=checkpoint.run,
            attempt=checkpoint.attempt,
            checkpoint_checksum=checkpoint.checksum,
            version=fence.version + 1,
            rows=commit.rows,
            size_bytes=commit.size_bytes,
        )
        shelf.receipts[checkpoint.epoch] = receipt
        shelf.head = replace(
            shelf.head, version=fence.version + 1, epoch=checkpoint.epoch, entry=commit.entry, checkpoint=checkpoint
        )
        return receipt

    def find_receipt(self, epoch: int) -> Receipt | None:
        return self._shelf.receipts.get(epoch)

    def find_schema(self) -> pa.Schema | None:
        return self._shelf.schema if self._shelf.schema.names else None


class ShelfStager(Stager):
    """Keeps the rows of one task in the description of its one file."""

    def __init__(self, target: dict[str, Json], attempt: str) -> None:
        self._rows: list[dict[str, Any]] = []

    @property
    def files_done(self) -> int:
        return 0

    @property
    def files(self) -> int:
        return int(bool(self._rows))

    def write(self, batch: pa.RecordBatch) -> None:
        self._rows += batch.select(["id"]).to_pylist()

    def close(self) -> list[dict[str, Json]]:
        return [{"path": "memory", "rows": len(self._rows), "size_bytes": 0, "held": self._rows}] if self._rows else []

    def discard(self) -> None:
        self._rows.clear()


@pytest.fixture(autouse=True)
def shelf(monkeypatch: pytest.MonkeyPatch) -> None:
    kind = ModuleType("shelf_kind")
    kind.__dict__.update(open_sink=ShelfSink, open_stager=ShelfStager)
    monkeypatch.setitem(sys.modules, "shelf_kind", kind)
    monkeypatch.setitem(registry.KINDS, "shelf", "shelf_kind")
    SHELVES.clear()


@pytest.fixture(params=["decides", "further", "optional"])
def options(request: pytest.FixtureRequest, make_options: MakeOptions, tmp_path: Path) -> PipelineOptions:
    """A shelf beside a table; it decides, or is given what the table decided."""
    table = DeltaSinkOptions("table", str(tmp_path / "table"))
    shelf = ShelfOptions("shelf", str(tmp_path / "shelf"), required=request.param != "optional")
    sinks = (shelf, table) if request.param == "decides" else (table, shelf)
    return make_options(max_files=1, sinks=sinks)


def shelved() -> Counter[int]:
    return Counter(int(row["id"]) for row in SHELVES["shelf"].rows)


def test_every_sink_gets_every_row_once(options: PipelineOptions, sample: SampleInput, tmp_path: Path) -> None:
    for number in (1, 2, 3):
        sample.add(f"f{number}.json", 3)
        run_to_end(options)
    assert shelved() == table_ids(tmp_path / "table") == sample.ids
    pipeline = open_pipeline(options)
    assert [(sink["epoch"], sink["error"]) for sink in load_status(pipeline).sinks] == [(3, None), (3, None)]
    assert [view.holds for view in load_epoch(pipeline, None, 2).sinks] == [True, True]


def test_a_rollback_names_the_sink_that_cannot_go_back(
    options: PipelineOptions, sample: SampleInput, tmp_path: Path
) -> None:
    for number in (1, 2):
        sample.add(f"f{number}.json", 3)
        run_to_end(options)
    with pytest.raises(RollbackRefusedError, match="shelf cannot take rows back"):
        Rollback(open_pipeline(options), 1).perform("person")
    with pytest.raises(RollbackRefusedError, match="shelf cannot take rows back"):
        start_over(open_pipeline(options), 2, "person", truncate=True)
    if options.deciding.name == "table":
        Rollback(open_pipeline(options), 1, leave=["shelf"]).perform("person")
        assert sum(table_ids(tmp_path / "table").values()) == 3
        run_to_end(options)
        assert table_ids(tmp_path / "table") == sample.ids
        assert shelved() - sample.ids == Counter(dict.fromkeys((4, 5, 6), 1)), "left as it was, and given again"


def test_a_fresh_start_reaches_every_sink(options: PipelineOptions, sample: SampleInput, tmp_path: Path) -> None:
    sample.add("f1.json", 3)
    run_to_end(options)
    start_over(open_pipeline(options), 1, "person")
    run_to_end(options)
    twice = Counter(dict.fromkeys(sample.ids, 2))
    assert shelved() == table_ids(tmp_path / "table") == twice
