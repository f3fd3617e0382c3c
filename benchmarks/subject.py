"""The subject: Firnline pipelines run in this process, on a session that is warm."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import firnline
from firnline.clock import monotonic
from firnline.jobs.spark import SparkEngine
from firnline.run.observer import EpochFacts, Observer
from firnline.run.open_pipeline import open_pipeline
from firnline.run.runner import Runner


class Facts(Observer):
    """Keeps what every epoch told."""

    def __init__(self) -> None:
        self.epochs: list[EpochFacts] = []

    def committed(self, facts: EpochFacts) -> None:
        self.epochs.append(facts)


def pipeline(source: Path, table: Path, **batch: Any) -> firnline.Pipeline:
    """A pipeline of defaults, but for the limits of an epoch."""
    return firnline.Pipeline(
        name="bench",
        sources={"records": {"type": "files", "path": str(source)}},
        sinks=[{"type": "delta", "table": str(table)}],
        batch=batch,
        checkpoint={"store": {"type": "file", "path": str(table.parent / "store")}},
    )


def ingest(engine: Any, source: Path, work: Path, *, fresh: bool = True, **batch: Any) -> tuple[float, Facts]:
    """Ingest a folder into a new table until it is exhausted; returns seconds and what the epochs told."""
    if fresh:
        shutil.rmtree(work, ignore_errors=True)
    options = pipeline(source, work / "table", **batch).options
    facts = Facts()
    began = monotonic()
    result = Runner(open_pipeline(options, once=True), engine, facts, once=True).run()
    seconds = monotonic() - began
    if result.error is not None:
        raise result.error
    return seconds, facts


def new_engine() -> SparkEngine:
    return SparkEngine("bench", {})
