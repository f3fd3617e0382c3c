"""Parts of the dashboard without a browser: words, drawings, rates, readings, static files, who is asked what."""

from __future__ import annotations

import itertools
import threading
from datetime import UTC, datetime, timedelta

import pytest

from firnline.clock import SystemClock
from firnline.errors import SinkError
from firnline.graph import Edge, Graph, Node
from firnline.service.dashboard import words
from firnline.service.dashboard.drawings import NODE_HEIGHT, NODE_WIDTH, bars, draw, spark
from firnline.service.dashboard.plan_pages import FORMS, _parse
from firnline.service.dashboard.readings import Readings, StillReadingError
from firnline.service.dashboard.static import load_files, static_url
from firnline.service.glance import Glance
from firnline.service.problems import ServiceError
from firnline.service.rates import KEPT_SAMPLES, SAMPLE_SECONDS, Sample, add_sample, find_rate, find_rates

NOW = datetime(2026, 5, 1, 12, tzinfo=UTC)


def test_figures_in_words() -> None:
    assert [words.count(one) for one in (None, 0, 12.34, 1234.5, 1e6)] == ["–", "0", "12.3", "1,234", "1,000,000"]  # noqa: RUF001
    assert [words.size(one) for one in (0, 999, 1000, 2.5e9, 3e12)] == ["0 B", "999 B", "1.0 KB", "2.5 GB", "3.0 TB"]
    seconds = (0.035, 1.2, 185, 7800, 5 * 86400)
    assert [words.duration(one) for one in seconds] == ["35 ms", "1.2 s", "3 min 05 s", "2 h 10 min", "5 days"]
    ages = (0.5, 12, 600, 7200, 3 * 86400)
    said = [words.ago((NOW - timedelta(seconds=one)).isoformat(), NOW) for one in ages]
    assert said == ["just now", "12 s ago", "10 min ago", "2 h ago", "3 days ago"]
    assert words.raw_text("/wBhCg==", 100) == "\\xff\\x00a\n"


def test_states_that_need_attention_have_their_own_tone() -> None:
    assert [words.tone(one) for one in ("running", "paused", "died", "new", "is filled from 3")] == [
        "good", "warn", "bad", "calm", "busy",
    ]  # fmt: skip
    assert words.tone("something new") == "calm"


def test_bars_share_one_scale() -> None:
    found = bars({"plan": 0, "run": 50, "commit": 25, "checkpoint": 40}, 100)
    assert [(one.step, one.x, one.width) for one in found] == [("run", 0.0, 500.0), ("commit", 500.0, 250.0)]
    assert bars({}, 0) == []


def test_a_sparkline_fits_its_box() -> None:
    points = [tuple(map(int, one.split(","))) for one in spark([0, 5, 10]).split()]
    assert points == [(0, 20), (60, 11), (120, 2)]
    assert spark([1.0]) == ""
    assert len(spark([0, 0, 0]).split()) == 3


def test_a_line_that_passes_a_column_crosses_no_box() -> None:
    source, operator = Node("source", "in", "files"), Node("operator", "totals", "aggregate", ("in",))
    sinks = Node("sink", "a", "delta", ("totals",)), Node("sink", "in", "delta", ("in",))
    edges = (Edge(source, "", operator), Edge(operator, "", sinks[0]), Edge(source, "", sinks[1]))
    found = draw(Graph((source, operator, *sinks), edges))
    box = next(one for one in found.boxes if one.node is operator)
    passes = found.lines[2].path
    height = int(passes.split("H")[0].split()[-1])
    assert "H" in passes
    assert not box.y <= height <= box.y + NODE_HEIGHT
    assert all(one.x + NODE_WIDTH <= found.width and one.y + NODE_HEIGHT <= found.height for one in found.boxes)


def glance(seconds: float, run: str, rows: int) -> Glance:
    at = (NOW + timedelta(seconds=seconds)).isoformat()
    return Glance("p", at, "running", run={"run": run, "rows": rows})


def test_rates_come_from_samples_of_one_run() -> None:
    samples: tuple[Sample, ...] = ()
    for step in range(KEPT_SAMPLES * 3):
        samples = add_sample(samples, glance(step * SAMPLE_SECONDS / 2, "one", step * 100))
    assert len(samples) == KEPT_SAMPLES
    assert find_rate(samples) == pytest.approx(20.0)
    assert find_rates(samples) == pytest.approx([20.0] * (KEPT_SAMPLES - 1))
    again = add_sample(samples, glance(10_000, "two", 7))
    assert find_rate(again) is None
    assert find_rates(again)[-1] >= 0
    assert add_sample(again, Glance("p", NOW.isoformat(), "unreadable")) == again


def test_readings_are_shared_and_kept_for_a_while() -> None:
    readings, numbers = Readings(SystemClock()), itertools.count(1)
    first = readings.get("a", lambda: next(numbers), 60)
    again = readings.get("a", lambda: next(numbers), 60)
    assert (first.value, again) == (1, first)
    assert readings.get("b", lambda: 2).value == 2


def test_a_reading_that_hangs_holds_up_nobody() -> None:
    gate = threading.Event()
    readings = Readings(SystemClock(), readers=2, patience_seconds=0.05)
    assert readings.get("a", lambda: "old", 0.0).value == "old"
    try:
        for _ in range(3):  # all but the first only join it
            assert readings.get("a", gate.wait).value == "old"
        with pytest.raises(StillReadingError):
            readings.get("b", gate.wait)
        with pytest.raises(StillReadingError):
            readings.get("c", lambda: "no reader is free")
    finally:
        gate.set()


def test_a_reading_that_fails_is_tried_again() -> None:
    readings = Readings(SystemClock())

    def fail() -> None:
        raise SinkError("away")

    with pytest.raises(SinkError):
        readings.get("a", fail)
    assert readings.get("a", lambda: 1).value == 1


def test_static_files_bear_their_content_in_their_url() -> None:
    assert {"firnline.css", "firnline.js", "htmx.min.js", "uplot.min.js", "htmx.LICENSE.txt"} <= load_files().keys()
    assert static_url("firnline.js") == f"/static/{load_files()['firnline.js'].hash}/firnline.js"


def test_forms_take_what_the_routes_take() -> None:
    assert _parse(FORMS["rollback"], {"to": ["3"], "take_over": ["true"]})["to"] == 3
    assert _parse(FORMS["files-drop"], {"paths": ["a", "b"]})["paths"] == ["a", "b"]
    assert _parse(FORMS["sinks-resync"], {"sink": ["hook"]})["sink"] == "hook"
    for kind, fields in (
        ("rollback", {"to": ["x"]}),
        ("sinks-resync", {"sink": ["../x"]}),
        ("savepoint-dispose", {}),
        ("files-retry", {}),
    ):
        with pytest.raises(ServiceError):
            _parse(FORMS[kind], fields)
