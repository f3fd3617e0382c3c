"""What a run says about itself, in words and numbers."""

from __future__ import annotations

from io import StringIO
from typing import Any

import pytest
from rich.console import Console

from firnline.cli.run import _last_line
from firnline.cli.run_report import LiveDisplay, RunReporter, RunTotals, spark_start
from firnline.errors import BadRowError, FencedError, SinkError
from firnline.run.observer import Comparison, EpochFacts, Observers, SinkLag
from firnline.sinks.base import Head
from firnline.sources.base import Backlog
from tests.support.pipelines import MakeOptions


def facts(epoch: int, **changes: Any) -> EpochFacts:
    values: dict[str, Any] = {
        "epoch": epoch, "attempt": "a", "sink": "delta", "version": epoch + 1, "files": 2, "records": 2000,
        "rows": 2000, "bad": {}, "bytes_read": 1_000_000, "raw_bytes": 8_000_000, "staged_files": 1, "staged_bytes": 1,
        "late_files": 0,
        "checkpoint_bytes": 487, "state_files": 0, "set_aside": 0, "durations_ms": {"run": 200, "commit": 100},
    }  # fmt: skip
    return EpochFacts(**{**values, **changes})


class FakeTime:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def test_with_several_sinks_the_rows_of_each_are_named() -> None:
    said: list[str] = []
    run = RunReporter(said.append, attempts=5)
    run.committed(facts(1, rows=3, sink="a", sink_rows={"a": 3, "b": 8}))
    run.committed(facts(2, rows=0, sink="a", sink_rows={"a": 0, "b": 10}))
    run.committed(facts(3, rows=1, sink="a", sink_rows={"a": 1, "b": 0}))
    run.committed(facts(4, rows=0, sink="a", sink_rows={"a": 0, "b": 0}))
    assert [line.split("  ")[1] for line in said] == ["3 rows in a, 8 in b", "10 rows in b", "1 row in a", "0 rows"]


def test_a_run_in_words() -> None:
    said: list[str] = []
    run = Observers(RunReporter(said.append, attempts=5))
    run.started("r1", Head(exists=False, version=-1))
    run.claimed(1)
    run.running(1)
    run.committed(facts(1))
    run.running(2)
    run.committed(facts(2, rows=1999, files=1, bad={"not-json": 1}, late_files=1, set_aside=1))
    run.committed(facts(3, set_aside=1))
    run.reconciled(Comparison(late=2, changed=["/in/a"], grown=["/in/b", "/in/c"], listed=10))
    run.trouble(SinkError("disk full"), 1)
    run.resting(1.25, 1)
    run.trouble(FencedError("taken over"), 2)
    run.idle()
    run.idle()
    assert said == [
        "starting fresh",
        "claimed generation 1",
        "epoch 1 committed  2,000 rows  2 files  version 2  0.3 s",
        "epoch 2 committed  1,999 rows  1 file  version 3  0.3 s  1 quarantined (not-json 1)  1 late file",
        "1 file set aside; see `firnline files --status set_aside`",
        "epoch 3 committed  2,000 rows  2 files  version 4  0.3 s",
        "2 late files found among 10 listed",
        "1 file replaced after reading, and not read again: /in/a; see `firnline files --status changed`",
        "2 files grew after reading: /in/b; see `firnline files --status grown`",
        "failed: disk full",
        "retrying in 1.2 s (failure 1 of at most 5)",
        "all read; waiting for new files",
    ]


def test_resuming_names_the_epoch_and_every_repair() -> None:
    said: list[str] = []
    checkpoint: Any = object()
    held = Head(exists=True, version=9, generation=2, epoch=42, checkpoint=checkpoint, repairs=("copy 1 was damaged",))
    RunReporter(said.append, attempts=5).started("r1", held)
    assert said == ["resuming after epoch 42", "repaired: copy 1 was damaged"]


def test_time_left_follows_speed_and_backlog() -> None:
    time = FakeTime()
    tally = RunTotals(time)
    assert tally.seconds_left is None
    time.now = 110
    tally.running(1)  # Spark's start does not count
    tally.backlog(Backlog(10, 10_000_000))
    assert tally.seconds_left is None
    time.now = 112
    tally.committed(facts(1))
    tally.backlog(Backlog(8, 9_000_000))
    assert tally.speed == (500_000, 4_000_000)
    assert tally.seconds_left == pytest.approx(18)
    assert tally.summary()["records"] == 2000


def test_old_commits_leave_the_speed() -> None:
    time = FakeTime()
    tally = RunTotals(time)
    tally.running(1)
    for epoch in range(1, 200):
        time.now += 1
        tally.committed(facts(epoch))
    assert len(tally._recent) <= 33
    assert tally.speed[0] == pytest.approx(1_000_000, rel=0.1)


def test_an_epoch_with_operators_tells_its_sources_and_the_size_of_the_state() -> None:
    said: list[str] = []
    told = Observers(RunReporter(said.append, attempts=5))
    durations = {"run": 200, "checkpoint": 50, "commit": 100}
    operators = {"totals": {"state_bytes": 1500}, "firsts": {"state_bytes": 500}}
    told.committed(facts(1, operators=operators, sources={"a": 1500, "b": 500}, durations_ms=durations))
    told.committed(facts(2, operators=operators, sources={"a": 2000}, durations_ms=durations))
    told.worker_lost({"epoch": 3, "choice": "absorb", "shards": 1, "shards_before": 2})
    assert said == [
        "epoch 1 committed  2,000 rows  2 files  version 2  0.3 s  a 1,500, b 500  state 2.0 KB",
        "epoch 2 committed  2,000 rows  2 files  version 3  0.3 s  state 2.0 KB",
        "a worker was lost: epoch 3 runs again, with 1 shard",
    ]


def test_the_tally_keeps_the_size_of_the_state_that_the_newest_epoch_tells() -> None:
    tally = RunTotals(FakeTime())
    tally.committed(facts(1))
    assert tally.state_bytes is None
    tally.committed(facts(2, operators={"totals": {"state_bytes": 10}}))
    tally.committed(facts(3, operators={"totals": {"state_bytes": 7}}))
    assert tally.state_bytes == 7


def test_a_file_that_several_epochs_read_counts_once() -> None:
    tally = RunTotals(FakeTime())
    tally.committed(facts(1, files=1))
    tally.committed(facts(2, files=2, files_again=1))
    tally.committed(facts(3, files=1, files_again=1))
    assert tally.files == 2


def test_the_start_of_spark_is_a_step_with_its_seconds() -> None:
    time, said = FakeTime(), list[str]()
    tally = RunTotals(time)
    tally.running(1)
    spark = spark_start(tally, said.append)
    spark("starting")
    time.now += 7.3
    assert tally.step == "Spark starts, 7.3 s"
    spark("started")
    assert tally.step == "epoch 1 runs"
    assert said == ["starting Spark", "Spark started in 7.3 s"]
    time.now += 2
    tally.committed(facts(1))
    assert tally.speed == (500_000, 4_000_000)  # the seconds of the start do not count


def test_a_start_of_spark_that_fails_ends_the_step() -> None:
    said = list[str]()
    tally = RunTotals(FakeTime())
    spark = spark_start(tally, said.append)
    spark("starting")
    spark("failed")
    assert tally.step == "reading the table"
    assert said == ["starting Spark"]


def test_the_live_screen_names_sinks_that_lag_or_are_set_aside() -> None:
    tally = RunTotals(FakeTime())
    assert tally.lagging == []
    tally.sinks([SinkLag("topic", 9, 0, 0), SinkLag("lake", 8, 1, 900)])
    assert tally.lagging == [], "one epoch is on its way"
    tally.sinks([SinkLag("shop", 7, 2, 4100), SinkLag("cache", 1, 8, 0, set_aside=True), SinkLag("copy", 6, 3, 0)])
    assert tally.lagging == ["shop is 2 epochs (4.1 KB) behind", "cache is set aside", "copy is 3 epochs behind"]
    screen = StringIO()
    Console(file=screen, width=60).print(LiveDisplay(tally, screen).draw())
    assert "sink shop is 2 epochs (4.1 KB) behind" in screen.getvalue()


def test_a_retry_of_an_optional_sink_does_not_look_like_the_end_of_the_run() -> None:
    said: list[str] = []
    tally = RunTotals(FakeTime())
    run = Observers(RunReporter(said.append, attempts=5), tally)
    run.running(3)
    run.resting(1.25, 7, "cache")
    assert said == ["retrying in 1.2 s (failure 7; sink cache is optional: the others go on)"]
    assert tally.doing == "epoch 3 runs"
    run.resting(1.25, 2)
    assert said[1] == "retrying in 1.2 s (failure 2 of at most 5)"


def test_rows_of_followers_are_for_them_until_they_are_delivered() -> None:
    said: list[str] = []
    run = RunReporter(said.append, attempts=5)
    followers, rows = frozenset({"b", "c"}), {"a": 3, "b": 3, "c": 3}
    run.committed(facts(1, rows=3, sink="a", sink_rows=rows, followers=followers, filtered=frozenset({"c"})))
    assert said[0].split("  ")[1] == "3 rows in a, 3 for b, up to 3 for c"


def test_the_same_failure_of_an_optional_sink_is_shown_ever_more_rarely() -> None:
    said: list[str] = []
    tally = RunTotals(FakeTime())
    run = Observers(RunReporter(said.append, attempts=5), tally)
    for failures in range(1, 9):
        run.trouble(BadRowError("row 7 is too large"), 1, "cache")
        run.resting(2.0, failures, "cache")
    failed = [line for line in said if line.startswith("failed")]
    assert failed[0] == f"failed: row 7 is too large. Try: {BadRowError.default_hint}"
    assert failed[1:] == ["failed: row 7 is too large"] * 3
    assert [line.split("(")[1].split(";")[0] for line in said if "retrying" in line] == [
        f"failure {number}" for number in (1, 2, 4, 8)
    ]
    run.trouble(SinkError("the server is away"), 1, "cache")
    assert said[-1] == "failed: the server is away"
    run.trouble(BadRowError("it cannot hold a row", hint="Copy it."), 1, "cache")
    assert said[-1] == "failed: it cannot hold a row. Try: Copy it."
    run.delivered("cache", 4)
    run.delivered("cache", 5)
    assert said[-1] == "sink cache takes rows again: epoch 4 is delivered"
    run.trouble(BadRowError("it ends the run"), 1)
    assert said[-1] != "failed: it ends the run", "the run reports it at its end"
    assert tally.restarts == 0


def test_the_last_line_names_sinks_that_lack_epochs(make_options: MakeOptions) -> None:
    options, tally = make_options(), RunTotals(FakeTime())
    assert _last_line(options, tally, asked=True) == "stopped cleanly before anything was read or written"
    tally.started("r1", Head(exists=True, version=1, epoch=4))
    assert _last_line(options, tally, asked=True) == "stopped cleanly after epoch 4"
    assert _last_line(options, tally, asked=False) == "nothing to do; the table is at epoch 4"
    tally.sinks([SinkLag("topic", 4, 0, 0), SinkLag("shop", 3, 1, 900), SinkLag("old", 1, 3, 0, set_aside=True)])
    behind = "shop lacks epochs: see `firnline sinks list`; the next run delivers them"
    assert _last_line(options, tally, asked=False) == f"nothing read; the table is at epoch 4; {behind}"
    assert tally.summary()["sinks_behind"] == {"shop": 1, "old": 3}
    tally.trouble(BadRowError("sink 'shop' cannot hold row 7", hint="Copy it."), 1, "shop")
    refused = "shop lacks epochs, and no run can deliver them: sink 'shop' cannot hold row 7. Try: Copy it."
    assert _last_line(options, tally, asked=False) == f"nothing read; the table is at epoch 4; {refused}"
    tally.trouble(SinkError("the server is away"), 1, "shop")
    assert behind in _last_line(options, tally, asked=False)
