"""Prometheus metrics of a committer, one series a table of which it knows only a number, never its path."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Iterator

from prometheus_client import CollectorRegistry
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric, SummaryMetricFamily
from prometheus_client.registry import Collector

from firnline import __version__
from firnline.engine.observer import Observer
from firnline.errors import FirnlineError
from firnline.sinks.base import Held
from firnline.staging.committer import CycleReport
from firnline.staging.serving import CommitterObserver

PIPELINE = "committer"  # units of several pipelines share a commit, so the committer is their label


class StagingMetrics(CommitterObserver, Collector):
    """Listens to a committer, tells its health and the next observer, and answers scrapes."""

    def __init__(self, then: CommitterObserver, health: Observer | None = None) -> None:
        self._then = then
        self._health = health or Observer()
        self._lock = threading.Lock()
        self._counts: Counter[str] = Counter()
        self._seconds = 0.0
        self._pending: dict[str, int] = {}
        self._oldest: dict[str, float] = {}

    def registry(self) -> CollectorRegistry:
        registry = CollectorRegistry(auto_describe=False)
        registry.register(self)
        return registry

    def cycled(self, table: str, report: CycleReport) -> None:
        with self._lock:
            self._counts["commits"] += report.commits
            self._counts["units"] += report.units
            self._seconds += sum(report.commit_seconds)
            self._pending[table] = report.pending
            self._oldest[table] = report.oldest_pending_seconds if report.pending else 0.0
        self._health.started("", Held(exists=True, version=0))
        self._health.idle()
        self._then.cycled(table, report)

    def standing_by(self, table: str, holder: str) -> None:
        self._health.idle()
        self._then.standing_by(table, holder)

    def trouble(self, table: str, error: FirnlineError) -> None:
        with self._lock:
            self._counts["failed"] += 1
        self._health.trouble(error, 1)
        self._then.trouble(table, error)

    def collect(self) -> Iterator[Metric]:
        with self._lock:
            counts, seconds = Counter(self._counts), self._seconds
            pending, oldest = sum(self._pending.values()), max(self._oldest.values(), default=0.0)
        yield _gauge("firnline_staging_pending", "Units that wait to be committed.", pending)
        yield _gauge("firnline_staging_oldest_pending_seconds", "Age of the oldest of them.", oldest)
        yield _counter("firnline_staging_commits", "Delta commits made.", counts["commits"])
        yield _counter("firnline_staging_units", "Units committed.", counts["units"])
        yield _counter("firnline_batch_commit_failed", "Rounds that failed and were tried again.", counts["failed"])
        duration = SummaryMetricFamily(
            "firnline_staging_commit_duration_seconds", "How long commits took.", labels=["pipeline"]
        )
        duration.add_metric([PIPELINE], counts["commits"], seconds)
        yield duration
        info = GaugeMetricFamily("firnline_build_info", "Version.", labels=["pipeline", "version"])
        info.add_metric([PIPELINE, __version__], 1)
        yield info


def _gauge(name: str, about: str, value: float) -> Metric:
    family = GaugeMetricFamily(name, about, labels=["pipeline"])
    family.add_metric([PIPELINE], value)
    return family


def _counter(name: str, about: str, value: float) -> Metric:
    family = CounterMetricFamily(name, about, labels=["pipeline"])
    family.add_metric([PIPELINE], value)
    return family
