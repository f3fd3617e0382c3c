"""Metrics: their names are the agreed ones, their labels bounded, their numbers right."""

from __future__ import annotations

from typing import Any

from prometheus_client import generate_latest
from prometheus_client.parser import text_string_to_metric_families

from firnline.committer.committer import CycleReport
from firnline.committer.service import CommitterObserver
from firnline.errors import SinkError, SourceError
from firnline.run.observer import EpochFacts, SinkLag
from firnline.service.health import CommitterHealth
from firnline.service.metrics import PipelineMetrics, StagingMetrics
from firnline.sinks.base import Head
from firnline.sources.base import Backlog
from firnline.stores.replicator import Replication

NAMES = {
    "firnline_records_total", "firnline_bytes_read_total", "firnline_checkpoint_lag_seconds",
    "firnline_checkpoint_bytes",
    "firnline_checkpoint_duration_seconds", "firnline_batch_commit_total", "firnline_batch_commit_failed_total",
    "firnline_source_state_files", "firnline_source_lag_seconds", "firnline_backlog_files", "firnline_backlog_bytes",
    "firnline_staging_pending", "firnline_staging_oldest_pending_seconds", "firnline_late_files_total",
    "firnline_quarantined_records_total", "firnline_recovery_path_total", "firnline_checkpoint_pause_seconds",
    "firnline_replication_lag_seconds", "firnline_staging_commits_total", "firnline_staging_units_total",
    "firnline_staging_commit_duration_seconds", "firnline_set_aside_files", "firnline_ledger_hole",
    "firnline_restarts_total", "firnline_epoch",
    "firnline_build_info", "firnline_state_bytes", "firnline_state_keys_changed_total", "firnline_late_rows_total",
    "firnline_source_records_total", "firnline_worker_loss_total", "firnline_batch_staged_total",
    "firnline_staged_epoch", "firnline_rescued_values_total", "firnline_source_up",
    "firnline_log_lag_bytes", "firnline_log_lag_seconds", "firnline_log_retained_bytes", "firnline_log_alarm",
    "firnline_sink_epochs_behind", "firnline_sink_bytes_behind", "firnline_sink_set_aside",
    "firnline_sink_epoch", "firnline_sink_up", "firnline_sink_commits_total", "firnline_sink_rows_total",
    "firnline_source_idle_seconds",
}  # fmt: skip
LABELS = {"pipeline", "reason", "path", "version", "le", "operator", "source", "column", "sink"}
PARTS = ("_bucket", "_count", "_sum")


def facts(**changes: Any) -> EpochFacts:
    values: dict[str, Any] = {
        "epoch": 7, "attempt": "4be1", "sink": "delta", "version": 9, "files": 2, "records": 2000, "rows": 1998,
        "bad": {"not-json": 2}, "bytes_read": 1000, "raw_bytes": 8000, "staged_files": 1, "staged_bytes": 1,
        "late_files": 1, "checkpoint_bytes": 487, "state_files": 3, "set_aside": 1,
        "durations_ms": {"run": 200, "commit": 100},
    }  # fmt: skip
    return EpochFacts(**{**values, **changes})


def busy() -> PipelineMetrics:
    times = iter(range(100, 1000))
    metrics = PipelineMetrics("flights", lambda: float(next(times)))
    metrics.started("run-id", Head(exists=False, version=-1))
    metrics.committed(facts())
    metrics.committed(facts(epoch=8, bad={}, durations_ms={"run": 400_000}))
    metrics.backlog(Backlog(4, 9000))
    metrics.sources({"flights": None})
    metrics.sinks([SinkLag("topic", 8, 0, 0), SinkLag("shop", 5, 3, 700), SinkLag("cache", 2, 6, 0, set_aside=True)])
    metrics.trouble(SinkError("x", sink="shop"), 1)
    metrics.trouble(SourceError("y"), 2)
    metrics.resting(1.0, 2)
    return metrics


def folded(**changes: Any) -> dict[str, Any]:
    values = {"rows": 10, "late": 2, "keys": 5, "changed": 4, "removed": 1, "bytes_written": 100, "state_bytes": 900}
    return {**values, "out": {}, "seconds": {}, **changes}


def samples(metrics: PipelineMetrics) -> dict[tuple[str, tuple[tuple[str, str], ...]], float]:
    text = generate_latest(metrics.registry()).decode()
    return {
        (sample.name, tuple(sorted(sample.labels.items()))): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


def test_every_name_is_an_agreed_one_and_every_label_bounded() -> None:
    for name, labels in samples(busy()):
        plain = name
        for part in PARTS:
            plain = plain.removesuffix(part)
        assert plain in NAMES or name in NAMES
        assert "pipeline" in dict(labels)
        assert set(dict(labels)) <= LABELS
        assert not {"run-id", "4be1"} & set(dict(labels).values())


def test_the_numbers_are_right() -> None:
    found = samples(busy())

    def value(name: str, **labels: str) -> float:
        return found[f"firnline_{name}", tuple(sorted({"pipeline": "flights", **labels}.items()))]

    assert value("records_total") == 4000
    assert value("bytes_read_total") == 2000
    assert value("batch_commit_total") == 2
    assert value("batch_commit_failed_total", sink="shop") == 1
    assert value("batch_commit_failed_total", sink="topic") == value("batch_commit_failed_total", sink="delta") == 0
    assert [value("sink_epochs_behind", sink=sink) for sink in ("topic", "shop", "cache")] == [0, 3, 6]
    assert value("sink_bytes_behind", sink="shop") == 700
    assert [value("sink_set_aside", sink=sink) for sink in ("topic", "shop", "cache")] == [0, 0, 1]
    assert value("late_files_total") == 2
    assert value("restarts_total") == 1
    assert value("quarantined_records_total", reason="not-json") == 2
    assert value("recovery_path_total", path="fresh") == 1
    assert value("epoch") == 8
    assert value("backlog_files") == 4
    assert value("backlog_bytes") == 9000
    assert value("set_aside_files") == 1
    assert value("source_state_files") == 3
    assert value("checkpoint_bytes") == 487
    assert value("checkpoint_duration_seconds_count") == 2
    assert value("checkpoint_duration_seconds_sum") == 400.3
    assert value("checkpoint_duration_seconds_bucket", le="0.5") == 1
    assert value("checkpoint_duration_seconds_bucket", le="+Inf") == 2
    assert value("checkpoint_lag_seconds") > 0


def test_what_is_not_known_is_left_out() -> None:
    names = {name for name, _ in samples(PipelineMetrics("flights", lambda: 1.0))}
    assert not names & {"firnline_backlog_files", "firnline_epoch", "firnline_checkpoint_bytes"}
    assert "firnline_build_info" in names


def test_a_resumed_run_names_its_path_once() -> None:
    metrics = PipelineMetrics("flights", lambda: 1.0)
    checkpoint: Any = object()
    for _ in range(2):
        metrics.started("r", Head(exists=True, version=3, epoch=2, checkpoint=checkpoint, path="local"))
    assert samples(metrics)["firnline_recovery_path_total", (("path", "local"), ("pipeline", "flights"))] == 1


def test_the_replication_lag_grows_until_the_tier_is_level() -> None:
    now = 10.0
    metrics = PipelineMetrics("flights", lambda: now)

    def lag() -> float | None:
        return metrics.registry().get_sample_value("firnline_replication_lag_seconds", {"pipeline": "flights"})

    assert lag() is None
    metrics.replication(Replication("remote", "s3://b", epoch=3, epochs_behind=2, since=10.0, reason="away"))
    now = 25.0
    assert lag() == 15
    metrics.replication(Replication("remote", "s3://b", epoch=5))
    assert lag() == 0


def test_back_pressure_is_told_while_it_lasts() -> None:
    metrics = PipelineMetrics("flights", lambda: 0.0)

    def pending() -> float | None:
        return metrics.registry().get_sample_value("firnline_staging_pending", {"pipeline": "flights"})

    assert pending() is None
    metrics.held_up((3, 1000))
    assert pending() == 3
    metrics.held_up(None)
    assert pending() == 0


def test_state_is_told_by_operator_and_records_by_source() -> None:
    metrics = PipelineMetrics("flights", lambda: 0.0)
    took = {"run": 300, "checkpoint": 30, "commit": 100}
    metrics.committed(facts(operators={"totals": folded()}, sources={"a": 7, "b": 3}, durations_ms=took))
    after = {"totals": folded(state_bytes=700, late=0)}
    metrics.committed(facts(epoch=8, operators=after, sources={"a": 1}, durations_ms={"run": 100}))
    metrics.worker_lost({"epoch": 9, "choice": "replace", "shards": 2, "shards_before": 2})
    found = samples(metrics)

    def value(name: str, **labels: str) -> float:
        return found[f"firnline_{name}", tuple(sorted({"pipeline": "flights", **labels}.items()))]

    assert value("state_bytes", operator="totals") == 700
    assert value("state_keys_changed_total", operator="totals") == 10
    assert value("late_rows_total", operator="totals") == 2
    assert (value("source_records_total", source="a"), value("source_records_total", source="b")) == (8, 3)
    assert value("worker_loss_total") == 1
    assert (value("checkpoint_pause_seconds_count"), value("checkpoint_pause_seconds_sum")) == (1, 0.03)
    assert value("checkpoint_pause_seconds_bucket", le="0.025") == 0
    assert value("checkpoint_pause_seconds_bucket", le="0.05") == 1
    assert value("checkpoint_duration_seconds_sum") == 0.5  # the pause is a part of the run


def test_each_sink_has_its_epoch_rows_and_state() -> None:
    metrics = PipelineMetrics("flights", lambda: 0.0)
    metrics.committed(facts(sink="main", sink_rows={"main": 5, "copy": 2}))
    metrics.committed(facts(epoch=8, sink="main", sink_rows={"main": 5, "copy": 0}))
    metrics.delivered("copy", 7)
    metrics.trouble(SinkError("x", sink="copy"), 1)

    def of(name: str, sink: str) -> float | None:
        return metrics.registry().get_sample_value(f"firnline_sink_{name}", {"pipeline": "flights", "sink": sink})

    assert [of(name, "main") for name in ("epoch", "up", "commits_total", "rows_total")] == [8, 1, 2, 10]
    assert [of(name, "copy") for name in ("epoch", "up", "commits_total", "rows_total")] == [7, 0, 1, 2]
    metrics.delivered("copy", 8)
    assert (of("epoch", "copy"), of("up", "copy")) == (8, 1)


def test_a_journal_is_no_sink() -> None:
    metrics = PipelineMetrics("flights", lambda: 0.0)
    metrics.committed(facts(sink="journal", rows_in="topic", rows=3))
    found = {labels: number for (name, labels), number in samples(metrics).items() if name.startswith("firnline_sink_")}
    assert found == {(("pipeline", "flights"), ("sink", "topic")): 3}


def test_a_source_that_gives_no_records_is_seen_to_be_idle() -> None:
    now = 10.0
    metrics = PipelineMetrics("flights", lambda: now)
    metrics.committed(facts(sources={"a": 7, "b": 3}))
    now = 25.0
    metrics.committed(facts(epoch=8, sources={"a": 7, "b": 0}))
    now = 30.0
    idle = {
        dict(labels)["source"]: n for (name, labels), n in samples(metrics).items() if name.endswith("_idle_seconds")
    }
    assert idle == {"a": 5, "b": 20}


def test_without_operators_there_is_no_pause() -> None:
    assert not [name for name, _ in samples(busy()) if "pause" in name or "state_bytes" in name]


def value(metrics: PipelineMetrics, name: str) -> float | None:
    return metrics.registry().get_sample_value(f"firnline_{name}", {"pipeline": "flights"})


def test_a_staged_epoch_counts_as_committed_once_the_committer_has_committed_it() -> None:
    now = [100.0]
    metrics = PipelineMetrics("flights", lambda: now[0])
    metrics.started("run-id", Head(exists=True, version=3, epoch=6, committed=5))
    assert value(metrics, "epoch") == 5
    for epoch in (7, 8):
        metrics.committed(facts(epoch=epoch, is_staged=True, lag_seconds=2.0))
    now[0] += 30
    metrics.idle()
    assert (value(metrics, "epoch"), value(metrics, "staged_epoch")) == (5, 8)
    assert (value(metrics, "batch_commit_total"), value(metrics, "batch_staged_total")) == (0, 2)
    assert value(metrics, "checkpoint_lag_seconds") == 30
    metrics.log_committed(7)
    assert (value(metrics, "epoch"), value(metrics, "batch_commit_total")) == (7, 1)
    assert value(metrics, "source_lag_seconds") == 32
    assert value(metrics, "checkpoint_lag_seconds") == 0


def test_a_committer_is_unhealthy_while_one_of_its_tables_fails() -> None:
    health = CommitterHealth(lambda: 0.0)
    metrics = StagingMetrics(CommitterObserver(), health)
    assert not health.ready().ok
    for _ in range(5):
        metrics.trouble("s3://a/orders", SinkError("storage failed"))
        metrics.cycled("s3://b/orders", CycleReport())
        metrics.cycled("s3://b/flights", CycleReport())
    assert not health.healthy().ok
    assert health.healthy().reasons == ["s3://a/orders: 5 failures in a row; the last: storage failed"]
    failed = {
        sample.labels["table"]: sample.value
        for family in metrics.collect()
        for sample in family.samples
        if sample.name == "firnline_batch_commit_failed_total"
    }
    assert failed == {"orders": 5, "orders-2": 0, "flights": 0}
    metrics.cycled("s3://a/orders", CycleReport())
    assert health.healthy().ok
    assert health.ready().ok
