"""A sink that is no Delta table: rows in the memory of this process, committed together with the checkpoint."""

from __future__ import annotations

import sys
from collections import Counter
from dataclasses import dataclass, replace
from types import ModuleType
from typing import Any, ClassVar

import pyarrow as pa
import pytest

from firnline.checkpoint.codec import short_number
from firnline.errors import CommitConflictError, FencedError
from firnline.options import Home, SinkOptions
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


@dataclass
class Shelf:
    """What one sink holds, in this process."""

    head: Head
    rows: list[dict[str, Any]]
    schema: pa.Schema
    receipts: dict[int, Receipt]


SHELVES: dict[str, Shelf] = {}


@dataclass(frozen=True, slots=True)
class ShelfOptions(SinkOptions):
    """Options of a shelf; `folder` is where a deciding one keeps the ledger."""

    type: ClassVar[str] = "shelf"

    folder: str

    @property
    def location(self) -> str:
        return f"shelf:{self.name}"

    @property
    def home(self) -> Home:
        return Home(self.folder)


class ShelfSink(Sink):
    """Rows in memory, committed together with the checkpoint; they never go away again."""

    capabilities: ClassVar[Capabilities] = Capabilities(Delivery.EXACTLY_ONCE, decides=True)

    def __init__(self, options: ShelfOptions, context: SinkContext) -> None:
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


def register_shelf(
    monkeypatch: pytest.MonkeyPatch, sink: type[Sink] = ShelfSink, stager: type[Stager] = ShelfStager
) -> None:
    """Make `shelf` a kind of sink for one test, with nothing on any shelf."""
    kind = ModuleType("shelf_kind")
    kind.__dict__.update(open_sink=sink, open_stager=stager)
    monkeypatch.setitem(sys.modules, "shelf_kind", kind)
    monkeypatch.setitem(registry.KINDS, "shelf", "shelf_kind")
    SHELVES.clear()


def shelved() -> Counter[int]:
    return Counter(int(row["id"]) for row in SHELVES["shelf"].rows)
