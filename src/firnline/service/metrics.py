"""Prometheus metrics of one run: base units, counters end in `_total`, every metric is labelled by pipeline."""

from __future__ import annotations

import threading
from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Iterator

from prometheus_client import CollectorRegistry
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

from firnline import __version__
from firnline.checkpoint.replication import Replication
from firnline.engine.observer import EpochFacts, Observer
from firnline.errors import FirnlineError, SinkError
from firnline.sinks.base import Held
from firnline.sources.base import Backlog

BUCKETS_SECONDS = (0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0)


class _Durations:
    """A histogram of seconds."""

    def __init__(self) -> None:
        self._counts = [0] * (len(BUCKETS_SECONDS) + 1)
        self.total = 0.0

    def add(self, seconds: float) -> None:
        self._counts[bisect_left(BUCKETS_SECONDS, seconds)] += 1
        self.total += seconds

    def buckets(self) -> list[tuple[str, float]]:
        """Upper bounds with cumulative counts, as Prometheus wants them."""
        found, sum_so_far = [], 0
        for bound, count in zip((*map(str, BUCKETS_SECONDS), "+Inf"), self._counts, strict=True):
            sum_so_far += count
            found.append((bound, float(sum_so_far)))
        return found


class PipelineMetrics(Observer, Collector):
    """Listens to a run and answers scrapes, from any thread. Keeps numbers only: no path, key or run id."""

    def __init__(self, pipeline: str, monotonic: Callable[[], float]) -> None:
        self._pipeline = pipeline
        self._monotonic = monotonic
        self._lock = threading.Lock()
        self._counts: Counter[str] = Counter()
        self._quarantined: Counter[str] = Counter()
        self._recovery: Counter[str] = Counter()
        self._gauges: dict[str, float] = {}
        self._durations = _Durations()
        self._replication: Replication | None = None
        self._committed_at = monotonic()

    def registry(self) -> CollectorRegistry:
        """A registry with these metrics and nothing else."""
        registry = CollectorRegistry(auto_describe=False)
        registry.register(self)
        return registry

    # -- what the run tells ---------------------------------------------------------------------------

    def started(self, run: str, held: Held) -> None:
        with self._lock:
            if not self._recovery:
                self._recovery[held.path] += 1
            self._gauges["epoch"] = held.epoch

    def committed(self, facts: EpochFacts) -> None:
        with self._lock:
            self._counts["records"] += facts.records
            self._counts["bytes_read"] += facts.bytes_read
            self._counts["batch_commit"] += 1
            self._counts["late_files"] += facts.late_files
            self._quarantined.update(facts.bad)
            self._gauges |= {
                "epoch": facts.epoch,
                "checkpoint_bytes": facts.checkpoint_bytes,
                "source_state_files": facts.state_files,
                "set_aside_files": facts.set_aside,
                "lag": facts.lag_seconds,
            }
            self._durations.add(sum(facts.durations_ms.values()) / 1000)
            self._committed_at = self._monotonic()

    def backlog(self, backlog: Backlog) -> None:
        with self._lock:
            self._gauges["backlog_files"] = backlog.files_outstanding
            self._gauges["backlog_bytes"] = backlog.bytes_outstanding

    def held_up(self, full: tuple[int, int] | None) -> None:
        with self._lock:
            self._gauges["staging_pending"] = full[0] if full else 0

    def replication(self, lag: Replication) -> None:
        with self._lock:
            self._replication = lag

    def idle(self) -> None:
        with self._lock:
            self._committed_at = self._monotonic()  # nothing waits, so no checkpoint is behind

    def trouble(self, error: FirnlineError, failures: int) -> None:
        with self._lock:
            if isinstance(error, SinkError):
                self._counts["batch_commit_failed"] += 1

    def resting(self, seconds: float, failures: int) -> None:
        with self._lock:
            self._counts["restarts"] += 1

    # -- scrapes --------------------------------------------------------------------------------------

    def collect(self) -> Iterator[Metric]:
        with self._lock:
            found = [*self._counters(), *self._labelled(), *self._all_gauges(), self._histogram(), self._build_info()]
        yield from found

    def _counters(self) -> Iterator[Metric]:
        for name, text in (
            ("records", "Records read and committed, bad ones included."),
            ("bytes_read", "Bytes read from the source, as stored, and committed."),
            ("batch_commit", "Epochs committed."),
            ("batch_commit_failed", "Failures of a sink to take a commit or to answer."),
            ("late_files", "Late files taken in."),
            ("restarts", "Restarts after a failure."),
        ):
            family = CounterMetricFamily(f"firnline_{name}", text, labels=["pipeline"])
            family.add_metric([self._pipeline], self._counts[name])
            yield family

    def _labelled(self) -> Iterator[Metric]:
        for name, label, text, counts in (
            ("quarantined_records", "reason", "Records put in quarantine.", self._quarantined),
            ("recovery_path", "path", "Where runs resumed from.", self._recovery),
        ):
            family = CounterMetricFamily(f"firnline_{name}", text, labels=["pipeline", label])
            for value, count in sorted(counts.items()):
                family.add_metric([self._pipeline, value], count)
            yield family

    def _all_gauges(self) -> Iterator[Metric]:
        lag = self._monotonic() - self._committed_at
        replication = self._replication.lag_seconds(self._monotonic()) if self._replication else None
        for name, text, value in (
            ("epoch", "The newest committed epoch.", self._gauges.get("epoch")),
            ("checkpoint_bytes", "Size of the newest checkpoint.", self._gauges.get("checkpoint_bytes")),
            ("checkpoint_lag_seconds", "Time since the last commit or empty poll.", lag),
            ("replication_lag_seconds", "Age of the oldest checkpoint that the remote tier lacks.", replication),
            ("source_state_files", "Files named in the source's position.", self._gauges.get("source_state_files")),
            ("source_lag_seconds", "From arrival to commit, oldest file of the newest epoch.", self._gauges.get("lag")),
            ("set_aside_files", "Files that are set aside.", self._gauges.get("set_aside_files")),
            (
                "staging_pending",
                "Units that this run waits for the committer to take.",
                self._gauges.get("staging_pending"),
            ),
            ("backlog_files", "Files that wait to be read.", self._gauges.get("backlog_files")),
            ("backlog_bytes", "Bytes that wait to be read, as stored.", self._gauges.get("backlog_bytes")),
        ):
            if value is not None:  # what is not known yet is left out, never told as zero
                family = GaugeMetricFamily(f"firnline_{name}", text, labels=["pipeline"])
                family.add_metric([self._pipeline], value)
                yield family

    def _histogram(self) -> Metric:
        text = "Time from plan to commit of an epoch."
        family = HistogramMetricFamily("firnline_checkpoint_duration_seconds", text, labels=["pipeline"])
        family.add_metric([self._pipeline], self._durations.buckets(), self._durations.total)
        return family

    def _build_info(self) -> Metric:
        family = GaugeMetricFamily("firnline_build_info", "Always 1.", labels=["pipeline", "version"])
        family.add_metric([self._pipeline, __version__], 1)
        return family
