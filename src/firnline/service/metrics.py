"""Prometheus metrics of a run and of a committer: base units, counters end in `_total`."""

from __future__ import annotations

import itertools
import threading
from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from operator import attrgetter

from prometheus_client import CollectorRegistry
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
    SummaryMetricFamily,
)
from prometheus_client.registry import Collector

from firnline import __version__
from firnline.committer.committer import CycleReport
from firnline.committer.service import CommitterObserver
from firnline.errors import FirnlineError, LedgerHoleError, SinkError
from firnline.names import JOURNAL
from firnline.rescued import MAX_COLUMNS, OTHER_COLUMNS, Rescued
from firnline.run.observer import Comparison, EpochFacts, Observer, SinkLag, took_ms
from firnline.service.health import CommitterHealth
from firnline.sinks.base import Head
from firnline.sources.base import Backlog, LogLag
from firnline.stores.replicator import Replication
from firnline.types import Json

BUCKETS_SECONDS = (0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0)
PAUSE_SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.2, 0.5, 1.0, 5.0, 30.0)  # a run warns of a pause above 0.2 s


class _Durations:
    """A histogram of seconds."""

    def __init__(self, bounds: Sequence[float]) -> None:
        self._bounds = bounds
        self._counts = [0] * (len(bounds) + 1)
        self.total = 0.0

    def add(self, seconds: float) -> None:
        self._counts[bisect_left(self._bounds, seconds)] += 1
        self.total += seconds

    def buckets(self) -> list[tuple[str, float]]:
        """Return upper bounds with cumulative counts, as Prometheus expects them."""
        buckets, sum_so_far = [], 0
        for bound, count in zip((*map(str, self._bounds), "+Inf"), self._counts, strict=True):
            sum_so_far += count
            buckets.append((bound, float(sum_so_far)))
        return buckets


class PipelineMetrics(Observer, Collector):
    """Observes a run and answers scrapes, from any thread. Keeps only numbers: no path, key or run id."""

    def __init__(self, pipeline: str, monotonic: Callable[[], float]) -> None:
        self._pipeline = pipeline
        self._monotonic = monotonic
        self._lock = threading.Lock()
        self._counts: Counter[str] = Counter()
        self._quarantined: Counter[str] = Counter()
        self._rescued: Counter[str] = Counter()
        self._recovery: Counter[str] = Counter()
        self._gauges: dict[str, float] = {}
        self._durations = _Durations(BUCKETS_SECONDS)
        self._pauses: _Durations | None = None  # for checkpoints of state; none without operators
        self._source_records: Counter[str] = Counter()
        self._late_rows: Counter[str] = Counter()
        self._keys_changed: Counter[str] = Counter()
        self._state_bytes: dict[str, int] = {}  # by operator
        self._failed: Counter[str] = Counter()  # failed reads and commits, by sink
        self._sinks: tuple[SinkLag, ...] = ()
        self._sink_epochs: dict[str, int] = {}  # the newest that each sink holds
        self._sink_commits: Counter[str] = Counter()
        self._sink_rows: Counter[str] = Counter()
        self._sinks_up: dict[str, bool] = {}
        self._read_at: dict[str, float] = {}  # by source: when an epoch with records of it was committed
        self._replication: Replication | None = None
        self._copies: tuple[Replication, ...] = ()
        self._sources_up: dict[str, bool] = {}
        self._log_lags: Mapping[str, LogLag] = {}
        self._committed_at = monotonic()
        self._staged: dict[int, tuple[float, float]] = {}  # epochs that wait for a committer: their lag, and since when

    def registry(self) -> CollectorRegistry:
        """Return a registry with only these metrics."""
        registry = CollectorRegistry(auto_describe=False)
        registry.register(self)
        return registry

    # -- events of the run ----------------------------------------------------------------------------

    def started(self, run: str, held: Head) -> None:
        with self._lock:
            if not self._recovery:
                self._recovery[held.path] += 1
            self._gauges["epoch"] = held.epoch if held.committed is None else held.committed

    def committed(self, facts: EpochFacts) -> None:
        with self._lock:
            self._counts["records"] += facts.records
            self._failed[facts.sink] += 0  # a rate needs a first value
            self._counts["bytes_read"] += facts.bytes_read
            self._counts["late_files"] += facts.late_files
            self._quarantined.update(facts.bad)
            self._add_rescued(facts.rescued)
            self._gauges |= {
                "checkpoint_bytes": facts.checkpoint_bytes,
                "source_state_files": facts.state_files,
                "set_aside_files": facts.set_aside,
            }
            self._durations.add(took_ms(facts.durations_ms) / 1000)
            self._source_records.update(facts.sources)
            self._read_at |= {source: self._monotonic() for source, records in facts.sources.items() if records}
            self._sink_rows.update(facts.sink_rows or {facts.rows_in or facts.sink: facts.rows})
            self._sink_holds(facts.sink, facts.epoch)
            for name, did in facts.operators.items():
                self._folded(name, did)
            if "checkpoint" in facts.durations_ms:
                self._pauses = self._pauses or _Durations(PAUSE_SECONDS)
                self._pauses.add(facts.durations_ms["checkpoint"] / 1000)
            if facts.is_staged:
                self._counts["batch_staged"] += 1
                self._gauges["staged_epoch"] = facts.epoch
                self._staged[facts.epoch] = (facts.lag_seconds, self._monotonic())
            else:
                self._visible(facts.epoch, facts.lag_seconds, 1)

    def delivered(self, sink: str, epoch: int) -> None:
        with self._lock:
            self._sink_holds(sink, epoch)

    def values_rescued(self, sink: str, epoch: int, found: Sequence[Rescued]) -> None:
        with self._lock:
            self._add_rescued(found)

    def _sink_holds(self, sink: str, epoch: int) -> None:
        if sink != JOURNAL:  # it is no sink of the spec; `firnline_epoch` is its epoch
            self._sink_epochs[sink] = epoch
            self._sink_commits[sink] += 1
            self._sinks_up[sink] = True

    def sinks(self, lags: Sequence[SinkLag]) -> None:
        with self._lock:
            self._sink_epochs |= {lag.sink: lag.epoch for lag in lags}
            self._sinks = tuple(lags)
            self._failed.update(dict.fromkeys((lag.sink for lag in lags), 0))

    def reconciled(self, found: Comparison) -> None:
        with self._lock:
            self._gauges |= {
                "grown_files": found.all_grown,
                "changed_files": found.all_changed,
                "incomplete_files": found.all_incomplete,
            }

    def _add_rescued(self, rescued: Sequence[Rescued]) -> None:
        """Count values by column; columns beyond the first `MAX_COLUMNS` share one label."""
        for one in rescued:
            known = one.name in self._rescued or len(self._rescued) < MAX_COLUMNS
            self._rescued[one.name if known else OTHER_COLUMNS] += one.values

    def log_committed(self, epoch: int) -> None:
        with self._lock:
            now = self._monotonic()
            visible = {n: self._staged.pop(n) for n in sorted(self._staged) if n <= epoch}
            lag, since = visible[max(visible)] if visible else (0.0, now)
            self._visible(epoch, lag + now - since, len(visible))

    def _visible(self, epoch: int, lag_seconds: float, epochs: int) -> None:
        """Count epochs that readers of the table see now."""
        self._counts["batch_commit"] += epochs
        self._gauges |= {"epoch": epoch, "lag": lag_seconds}
        self._committed_at = self._monotonic()

    def _folded(self, operator: str, did: dict[str, Json]) -> None:
        self._late_rows[operator] += int(did.get("late", 0))
        self._keys_changed[operator] += int(did.get("changed", 0)) + int(did.get("removed", 0))
        self._state_bytes[operator] = int(did.get("state_bytes", 0))

    def worker_lost(self, facts: dict[str, Json]) -> None:
        with self._lock:
            self._counts["worker_loss"] += 1

    def backlog(self, backlog: Backlog) -> None:
        with self._lock:
            self._gauges["backlog_files"] = backlog.files_outstanding
            self._gauges["backlog_bytes"] = backlog.bytes_outstanding

    def log_lags(self, lags: Mapping[str, LogLag]) -> None:
        with self._lock:
            self._log_lags = lags

    def sources(self, unreachable: Mapping[str, str | None]) -> None:
        with self._lock:
            self._sources_up = {name: reason is None for name, reason in unreachable.items()}

    def ledger_hole(self, error: LedgerHoleError | None) -> None:
        with self._lock:
            self._gauges["ledger_hole"] = int(error is not None)

    def held_up(self, full: tuple[int, int] | None) -> None:
        with self._lock:
            self._gauges["staging_pending"] = full[0] if full else 0

    def replication(self, lag: Replication) -> None:
        with self._lock:
            self._replication = lag

    def copies(self, lags: Sequence[Replication]) -> None:
        with self._lock:
            self._copies = tuple(lags)

    def idle(self) -> None:
        with self._lock:
            if not self._staged:
                self._committed_at = self._monotonic()  # nothing waits, so no checkpoint is behind

    def trouble(self, error: FirnlineError, failures: int, optional: str = "") -> None:
        with self._lock:
            if isinstance(error, SinkError):
                sink = str(error.fields.get("sink") or "")
                self._failed[sink] += 1
                if sink not in ("", JOURNAL):
                    self._sinks_up[sink] = False

    def resting(self, seconds: float, failures: int, optional: str = "") -> None:
        if not optional:
            with self._lock:
                self._counts["restarts"] += 1

    # -- scrapes --------------------------------------------------------------------------------------

    def collect(self) -> Iterator[Metric]:
        with self._lock:
            families = [
                *self._counters(),
                *self._labelled(),
                *self._all_gauges(),
                self._state_gauge(),
                *self._copy_gauges(),
                *self._sink_gauges(),
                *self._source_gauges(),
                *self._log_gauges(),
            ]
            families += [*self._histograms(), self._build_info()]
        yield from families

    def _counters(self) -> Iterator[Metric]:
        for name, text in (
            ("records", "Records of epochs that are committed or staged, bad ones included."),
            ("bytes_read", "Bytes read from the source, as stored, for epochs that are committed or staged."),
            ("batch_commit", "Epochs committed: readers see them."),
            ("batch_staged", "Epochs staged in a two-stage table; its committer commits them."),
            ("late_files", "Late files ingested."),
            ("restarts", "Restarts after a failure."),
            ("worker_loss", "Workers lost while they ran a task."),
        ):
            family = CounterMetricFamily(f"firnline_{name}", text, labels=["pipeline"])
            family.add_metric([self._pipeline], self._counts[name])
            yield family

    def _labelled(self) -> Iterator[Metric]:
        for name, label, text, counts in (
            ("quarantined_records", "reason", "Records put in quarantine.", self._quarantined),
            ("rescued_values", "column", "Values that did not fit their column.", self._rescued),
            ("recovery_path", "path", "Restores by the copy that the checkpoint was read from.", self._recovery),
            (
                "source_records",
                "source",
                "Records of committed or staged epochs, by source.",
                self._source_records,
            ),
            ("sink_commits", "sink", "Epochs that the sink took.", self._sink_commits),
            ("sink_rows", "sink", "Rows of decided epochs for the sink, before its `where`.", self._sink_rows),
            ("batch_commit_failed", "sink", "Failed reads and commits of a sink.", self._failed),
            ("late_rows", "operator", "Rows that arrived after their window had closed.", self._late_rows),
            ("state_keys_changed", "operator", "Keys whose state was changed or removed.", self._keys_changed),
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
            ("staged_epoch", "The newest epoch that is staged in a two-stage table.", self._gauges.get("staged_epoch")),
            ("checkpoint_bytes", "Size of the newest checkpoint.", self._gauges.get("checkpoint_bytes")),
            ("checkpoint_lag_seconds", "Time since the last commit or empty poll.", lag),
            ("replication_lag_seconds", "Age of the oldest checkpoint that the remote tier lacks.", replication),
            ("source_state_files", "Files named in the source's position.", self._gauges.get("source_state_files")),
            (
                "source_lag_seconds",
                "Time from arrival to commit of the oldest file in the newest epoch.",
                self._gauges.get("lag"),
            ),
            ("set_aside_files", "Files that are set aside.", self._gauges.get("set_aside_files")),
            ("grown_files", "Files that grew after they were read.", self._gauges.get("grown_files")),
            ("changed_files", "Files that were replaced after they were read.", self._gauges.get("changed_files")),
            (
                "incomplete_files",
                "Files whose last line is left until it is complete (on_growth: read_rest).",
                self._gauges.get("incomplete_files"),
            ),
            (
                "ledger_hole",
                "1 while late files are not ingested because the ledger has a hole.",
                self._gauges.get("ledger_hole", 0),
            ),
            (
                "staging_pending",
                "Pending units that this run waits for the committer to commit.",
                self._gauges.get("staging_pending"),
            ),
            ("backlog_files", "Files not read yet.", self._gauges.get("backlog_files")),
            ("backlog_bytes", "Bytes not read yet, as stored.", self._gauges.get("backlog_bytes")),
        ):
            if value is not None:  # a value that is not known yet is left out, never reported as zero
                family = GaugeMetricFamily(f"firnline_{name}", text, labels=["pipeline"])
                family.add_metric([self._pipeline], value)
                yield family

    def _state_gauge(self) -> Metric:
        family = GaugeMetricFamily("firnline_state_bytes", "Size of operators' state.", labels=["pipeline", "operator"])
        for name, size in sorted(self._state_bytes.items()):
            family.add_metric([self._pipeline, name], size)
        return family

    def _copy_gauges(self) -> Iterator[Metric]:
        labels = ["pipeline", "copy"]
        up = GaugeMetricFamily("firnline_copy_up", "1 if the last write to the store or tier succeeded.", labels=labels)
        behind = GaugeMetricFamily("firnline_copy_epochs_behind", "Epochs that the copy lacks.", labels=labels)
        for lag in self._copies:
            up.add_metric([self._pipeline, lag.tier], 0 if lag.reason else 1)
            behind.add_metric([self._pipeline, lag.tier], lag.epochs_behind)
        yield from (up, behind)

    def _sink_gauges(self) -> Iterator[Metric]:
        for name, text, values in (
            ("epochs_behind", "Epochs that the sink lacks.", [lag.epochs_behind for lag in self._sinks]),
            ("bytes_behind", "Bytes in the outbox that wait for the sink.", [lag.bytes_behind for lag in self._sinks]),
            ("set_aside", "1 if the sink is set aside: it gets nothing.", [int(lag.set_aside) for lag in self._sinks]),
        ):
            family = GaugeMetricFamily(f"firnline_sink_{name}", text, labels=["pipeline", "sink"])
            for lag, value in zip(self._sinks, values, strict=True):
                family.add_metric([self._pipeline, lag.sink], value)
            yield family

        for name, text, by_sink in (
            ("epoch", "The newest epoch that the sink holds.", self._sink_epochs),
            ("up", "1 if the last commit or read of the sink succeeded.", self._sinks_up),
        ):
            family = GaugeMetricFamily(f"firnline_sink_{name}", text, labels=["pipeline", "sink"])
            for sink, number in sorted(by_sink.items()):
                family.add_metric([self._pipeline, sink], int(number))
            yield family

    def _source_gauges(self) -> Iterator[Metric]:
        text = "1 if the source can be read, 0 if its folder is gone."
        family = GaugeMetricFamily("firnline_source_up", text, labels=["pipeline", "source"])
        for name, is_up in self._sources_up.items():
            family.add_metric([self._pipeline, name], int(is_up))
        yield family
        text = "Time since the last commit with records of the source."
        family = GaugeMetricFamily("firnline_source_idle_seconds", text, labels=["pipeline", "source"])
        for name, at in sorted(self._read_at.items()):
            family.add_metric([self._pipeline, name], self._monotonic() - at)
        yield family

    def _log_gauges(self) -> Iterator[Metric]:
        for name, text, value in (
            ("lag_bytes", "Bytes of the server's log that are not read.", attrgetter("lag_bytes")),
            ("lag_seconds", "Time since the server wrote what is not read, at most.", attrgetter("lag_seconds")),
            ("retained_bytes", "Bytes of its log that the server keeps for the slot.", attrgetter("retained_bytes")),
            ("alarm", "1 while the slot keeps more than max_slot_lag_bytes, or is gone.", _alarm_of),
        ):
            family = GaugeMetricFamily(f"firnline_log_{name}", text, labels=["pipeline", "source"])
            for source, lag in self._log_lags.items():
                if (found := value(lag)) is not None:
                    family.add_metric([self._pipeline, source], found)
            yield family

    def _histograms(self) -> Iterator[Metric]:
        for name, text, durations in (
            ("checkpoint_duration_seconds", "Time from plan to commit of an epoch.", self._durations),
            ("checkpoint_pause_seconds", "Time that an epoch waited for its state checkpoint.", self._pauses),
        ):
            if durations is not None:
                family = HistogramMetricFamily(f"firnline_{name}", text, labels=["pipeline"])
                family.add_metric([self._pipeline], durations.buckets(), durations.total)
                yield family

    def _build_info(self) -> Metric:
        family = GaugeMetricFamily("firnline_build_info", "Always 1.", labels=["pipeline", "version"])
        family.add_metric([self._pipeline, __version__], 1)
        return family


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
            others = (f"{folder}-{number}" for number in itertools.count(2))
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


def _alarm_of(lag: LogLag) -> int | None:
    return None if lag.unknown else int(bool(lag.alarm))


def _gauge(metric: str, values: Mapping[str, float]) -> Metric:
    family = GaugeMetricFamily(f"firnline_{metric}", _GAUGES[metric], labels=LABELS)
    for name, value in values.items():
        family.add_metric([PIPELINE, name], value)
    return family
