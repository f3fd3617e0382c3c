"""A topology whose channels are parts: files -> bronze -> lake/{region} -> silver pipelines, for one region or some."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from firnline.clock import SystemClock
from firnline.history.topology.restore import RestoreResult, find_or_order, find_snapshot_epochs, perform_restore
from firnline.history.topology.snapshot import Snapshots
from firnline.options import PipelineOptions
from firnline.run.open_pipeline import open_pipeline
from firnline.sinks.delta.options import DeltaPartsOptions, DeltaSinkOptions
from firnline.sources.delta.options import DeltaSourceOptions
from firnline.topology.decide import Outcome
from firnline.topology.records import Order
from firnline.types import RandomIds
from tests.support.pipelines import pipeline_options, run_to_end
from tests.support.samples import SampleInput, table_ids
from tests.support.topologies import TIMEOUT, open_snapshots, settle


class PartLake:
    """`eu` is a silver pipeline that reads one region, `eu+us` is one that reads two. A file has rows of one region."""

    def __init__(self, folder: Path, *, reads: Iterable[str] = ("eu", "us"), **settings: Any) -> None:
        self.folder = folder
        self.sample = SampleInput(folder / "in")
        self.wanted: dict[str, Counter[int]] = {}
        self._files = 0
        sink = DeltaPartsOptions("lake", f"{folder}/lake/{{region}}", **settings)
        self.bronze = pipeline_options(
            str(folder / "in"), "", "bronze", sinks=(sink,), home=folder / "bronze", max_files=1
        )
        self.silvers = {regions: self.silver(regions) for regions in reads}

    def silver(self, regions: str) -> PipelineOptions:
        """A pipeline that appends the rows of one region to a table of its own, or of each of several."""
        sources = [
            DeltaSourceOptions(region, str(self.table(region)), poll_interval_secs=0.05, on_change="ignore")
            for region in regions.split("+")
        ]
        sinks = [
            DeltaSinkOptions(f"out_{one.name}", str(self.folder / f"silver_{one.name}"), input=one.name)
            for one in sources
        ]
        name = f"silver_{regions.replace('+', '_')}"
        return pipeline_options("", "", name, sources=sources, sinks=sinks, max_files=1)

    @property
    def regions(self) -> list[str]:
        return [region for regions in self.silvers for region in regions.split("+")]

    @property
    def members(self) -> list[PipelineOptions]:
        return [self.bronze, *self.silvers.values()]

    def table(self, region: str) -> Path:
        return self.folder / "lake" / region

    def add(self, region: str, records: int = 3) -> None:
        """A file with rows of one region: an epoch of bronze."""
        self._files += 1
        before = Counter(self.sample.ids)
        self.sample.add(f"f{self._files:03d}.json", records, region=region)
        self.wanted.setdefault(region, Counter()).update(self.sample.ids - before)

    def run(self, *members: PipelineOptions) -> None:
        for one in members or self.members:
            run_to_end(one)
        if not members:
            self.join()

    def join(self) -> None:
        """Run everybody until the lake is level and read: a run ends without waiting for an optional sink."""
        for _ in range(20):
            if len({sink.load().epoch for sink in open_pipeline(self.bronze).sinks}) == 1:
                break
            for one in self.members:
                run_to_end(one)
        else:
            raise AssertionError("the sink stays behind")

    def found(self) -> dict[str, Counter[int]]:
        """The ids in each part, with delta-rs and DuckDB."""
        return {log.parent.name: ids for log in self.folder.glob("lake/*/_delta_log") if (ids := table_ids(log.parent))}

    def read(self) -> dict[str, Counter[int]]:
        """The ids that the readers have, by region."""
        return {region: ids for region in self.regions if (ids := table_ids(self.folder / f"silver_{region}"))}

    def check(self, wanted: dict[str, Counter[int]] | None = None, where: str = "") -> None:
        """Each row is in its part, once, and in the table of the reader, once."""
        expected = self.wanted if wanted is None else wanted
        assert self.found() == expected, where
        assert self.read() == {region: expected[region] for region in self.regions if region in expected}, where

    def state(self) -> dict[str, Counter[int]]:
        return {region: Counter(ids) for region, ids in self.wanted.items()}

    # -- snapshots and restores -------------------------------------------------------------------------

    def open(self) -> Snapshots:
        return open_snapshots(self.folder, self.members)

    def take(self, between: Callable[[], object] = lambda: None) -> Order:
        """Take a snapshot; the runs record it after `between`."""
        snapshots = self.open()
        order = snapshots.order(TIMEOUT)
        between()
        self.run()
        assert settle(snapshots, order) == (Outcome.COMMIT, "")
        return order

    def restore(self, snapshot: str, epochs: dict[str, int] | None = None, **settings: Any) -> RestoreResult:
        snapshots = self.open()
        target, found = (snapshot, epochs) if epochs else find_snapshot_epochs(snapshots, snapshot)
        order = find_or_order(snapshots, target, found, SystemClock(), RandomIds(), **settings)
        return perform_restore(snapshots, order, RandomIds().new(), SystemClock(), print)
