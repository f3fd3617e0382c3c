"""Topologies for tests: chained pipelines with Delta channels, run in this process without Spark."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Literal

from firnline.clock import SystemClock
from firnline.history.topology.graph import Topology, make_topology
from firnline.history.topology.snapshot import Snapshots
from firnline.options import PipelineOptions
from firnline.run.open_pipeline import open_pipeline
from firnline.run.runner import Runner
from firnline.sinks.delta.options import DeltaSinkOptions
from firnline.sources.delta.options import DeltaSourceOptions
from firnline.storage import open_storage
from firnline.testing.local import LocalEngine
from firnline.topology.decide import Outcome
from firnline.topology.records import Order, TopologyHome
from firnline.types import RandomIds
from tests.support.pipelines import pipeline_options

TIMEOUT = timedelta(minutes=5)


def reads(folder: Path, *tables: str) -> tuple[DeltaSourceOptions, ...]:
    """Sources that read tables of the folder."""
    return tuple(
        DeltaSourceOptions(table, str(folder / table), poll_interval_secs=0.05, on_change="ignore") for table in tables
    )


def member(
    folder: Path, name: str, *tables: str, mode: Literal["direct", "staged"] = "direct", **settings: object
) -> PipelineOptions:
    """A pipeline that writes the table of its name; it reads other tables or, without any, the files in `in`."""
    sources = reads(folder, *tables)
    sink = DeltaSinkOptions(name, str(folder / name), mode=mode, input=tables[0] if len(tables) == 1 else "")
    return pipeline_options(
        str(folder / "in"), str(folder / name), name, sources=sources or None, sinks=(sink,), **settings
    )


def open_snapshots(folder: Path, members: Iterable[PipelineOptions] | Topology) -> Snapshots:
    topology = members if isinstance(members, Topology) else make_topology(members)
    home = TopologyHome(open_storage(str(folder / "home")), "lake")
    return Snapshots(topology, home, SystemClock(), RandomIds())


@contextmanager
def running(options: PipelineOptions) -> Iterator[Runner]:
    """A run in a thread, which is stopped at the end."""
    runner = Runner(open_pipeline(options), LocalEngine(1))
    thread = threading.Thread(target=runner.run, daemon=True)
    thread.start()
    try:
        yield runner
    finally:
        runner.stop()
        thread.join(60)
        assert not thread.is_alive()


def settle(snapshots: Snapshots, order: Order, seconds: float = 60.0) -> tuple[Outcome, str]:
    """Wait until a snapshot has an outcome."""
    clock = SystemClock()
    end = clock.monotonic() + seconds
    while True:
        outcome, reason = snapshots.settle(order)
        if outcome is not Outcome.WAIT:
            return outcome, reason
        assert clock.monotonic() < end, f"still waiting for {reason}"
        clock.sleep(0.05)
