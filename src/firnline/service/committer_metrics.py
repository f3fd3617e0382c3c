"""Prometheus metrics of a committer, per table; the label is the name of the table's folder, never its path."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Iterator, Mapping
from itertools import count

from prometheus_client import CollectorRegistry
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric, SummaryMetricFamily
from prometheus_client.registry import Collector

from firnline import __version__
from firnline.committer.committer import CycleReport
from firnline.committer.service import CommitterObserver
from firnline.errors import FirnlineError
from firnline.service.health import CommitterHealth
from firnline.sinks.base import Head

PIPELINE = "committer"  # units of several pipelines share a commit, so the committer is their label
LABELS = ["pipeline", "table"]

_GAUGES = {
    "staging_pending": "Units that wait to be committed.",
    "staging_oldest_pending_seconds": "Age of the oldest pending unit.",
}
_COUNTERS = {
    "staging_commits": "Delta commits made.",
    "staging_units": "Units committed.",
    "batch_commit_failed": "Commit rounds that failed and are retried.",
}


class StagingMetrics(CommitterObserver, Collector):
    """Observes a committer, notifies its health and the next observer, and answers scrapes."""

    def __init__(self, then: CommitterObserver, health: CommitterHealth) -> None:
        self._then = then
        self._health = health
        self._lock = threading.Lock()
        self._names: dict[str, str] = {}  # by table
        self._values: dict[str, Counter[str]] = {}  # by name
        self._seconds: dict[str, float] = {}
        self._oldest: dict[str, float] = {}

    def registry(self) -> CollectorRegistry:
        """Return a registry with only these metrics."""
        registry = CollectorRegistry(auto_describe=False)
        registry.register(self)
        return registry

    def cycled(self, table: str, report: CycleReport) -> None:
        with self._lock:
            name, values = self._of(table)
            values["staging_commits"] += report.commits
            values["staging_units"] += report.units
            values["staging_pending"] = report.pending
            self._seconds[name] = self._seconds.get(name, 0.0) + sum(report.commit_seconds)
            self._oldest[name] = report.oldest_pending_seconds if report.pending else 0.0
        health = self._health.of(table)
        health.started("", Head(exists=True, version=0))
        health.idle()
        self._then.cycled(table, report)

    def standing_by(self, table: str, holder: str) -> None:
        self._health.of(table).idle()
        self._then.standing_by(table, holder)

    def trouble(self, table: str, error: FirnlineError) -> None:
        with self._lock:
            _, values = self._of(table)
            values["batch_commit_failed"] += 1
        self._health.of(table).trouble(error, 1)
        self._then.trouble(table, error)

    def _of(self, table: str) -> tuple[str, Counter[str]]:
        """Return the label of a table (the name of its folder, with a number if two are equal) and its values."""
        if table not in self._names:
            folder = table.rstrip("/").rsplit("/", 1)[-1]
            others = (f"{folder}-{number}" for number in count(2))
            free = folder if folder not in self._values else next(name for name in others if name not in self._values)
            self._names[table], self._values[free] = free, Counter()
        name = self._names[table]
        return name, self._values[name]

    def collect(self) -> Iterator[Metric]:
        with self._lock:
            values = {name: Counter(counts) for name, counts in self._values.items()}
            seconds, oldest = dict(self._seconds), dict(self._oldest)
        yield _gauge("staging_pending", {name: counts["staging_pending"] for name, counts in values.items()})
        yield _gauge("staging_oldest_pending_seconds", oldest)
        for metric, about in _COUNTERS.items():
            family = CounterMetricFamily(f"firnline_{metric}", about, labels=LABELS)
            for name, counts in values.items():
                family.add_metric([PIPELINE, name], counts[metric])
            yield family
        duration = SummaryMetricFamily(
            "firnline_staging_commit_duration_seconds", "Duration of commits.", labels=LABELS
        )
        for name, counts in values.items():
            duration.add_metric([PIPELINE, name], counts["staging_commits"], seconds.get(name, 0.0))
        yield duration
        info = GaugeMetricFamily("firnline_build_info", "Version.", labels=["pipeline", "version"])
        info.add_metric([PIPELINE, __version__], 1)
        yield info


def _gauge(metric: str, values: Mapping[str, float]) -> Metric:
    family = GaugeMetricFamily(f"firnline_{metric}", _GAUGES[metric], labels=LABELS)
    for name, value in values.items():
        family.add_metric([PIPELINE, name], value)
    return family
