"""Rates of a pipeline from what successive glances saw: rows per second, now and over the last minutes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from itertools import pairwise

from firnline.service.glance import Glance

SAMPLE_SECONDS = 10.0  # between two samples that are kept
KEPT_SAMPLES = 61  # ten minutes
NOW_SECONDS = 60.0  # the span of the rate that counts as now


@dataclass(frozen=True, slots=True)
class Sample:
    """What a run had written at some time."""

    at: float  # seconds since 1970
    run: str
    rows: int


def add_sample(samples: tuple[Sample, ...], glance: Glance) -> tuple[Sample, ...]:
    """Return the samples with that of a glance, if it is time for one. The newest ones are kept."""
    run = glance.run
    if run is None or run.get("rows") is None or glance.state in ("unreadable", "invalid"):
        return samples
    at = datetime.fromisoformat(glance.read_at).timestamp()
    if samples and samples[-1].run == run["run"] and 0 <= at - samples[-1].at < SAMPLE_SECONDS:
        return samples
    return (*samples, Sample(at, str(run["run"]), int(run["rows"])))[-KEPT_SAMPLES:]


def find_rates(samples: Sequence[Sample]) -> list[float]:
    """Return the rows per second between each two samples, oldest first. A run that begins has written nothing."""
    rates = []
    for before, after in pairwise(samples):
        rows = after.rows - before.rows if after.run == before.run else after.rows
        rates.append(max(0.0, rows / max(after.at - before.at, 1.0)))
    return rates


def find_rate(samples: Sequence[Sample]) -> float | None:
    """Return the rows per second of the last minute; None if too little was seen of the run."""
    if not samples:
        return None
    newest = samples[-1]
    recent = [one for one in samples if one.run == newest.run and newest.at - one.at <= NOW_SECONDS]
    if len(recent) < 2:
        return None
    return max(0.0, (newest.rows - recent[0].rows) / max(newest.at - recent[0].at, 1.0))
