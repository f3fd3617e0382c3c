"""Aggregates over windows of event time, against plain Python."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from firnline.errors import ConfigError
from firnline.operators.aggregate import WINDOW_START
from firnline.operators.base import LATE, MAIN, Batch, EpochContext
from firnline.operators.loading import build_operator
from firnline.options import OperatorOptions
from firnline.testing.operators import Epoch, Harness, OperatorConformance

SCHEMA = pa.schema([("k", pa.string()), ("v", pa.int64()), ("t", pa.timestamp("us", "UTC"))])
BEGIN = datetime(1970, 1, 1, tzinfo=UTC)
Rows = list[tuple[str | None, int | None, int | None]]


def make(size: int = 10, slide: int | None = None, inputs: tuple[str, ...] = ("in",), **more: Any) -> Any:
    window = {"size_us": size} if slide is None else {"size_us": size, "slide_us": slide}
    aggregates = [
        {"name": "n", "function": "count"},
        {"name": "sum", "function": "sum", "column": "v"},
        {"name": "last", "function": "last", "column": "v"},
    ]
    settings = {"keys": ["k"], "aggregates": aggregates, "time": "t", "window": window, **more}
    return build_operator(OperatorOptions("w", "aggregate", inputs, settings), dict.fromkeys(inputs, SCHEMA), ())


def at(micros: int) -> datetime:
    return BEGIN + timedelta(microseconds=micros)


def table(rows: Rows) -> pa.Table:
    return pa.Table.from_pylist([{"k": k, "v": v, "t": None if t is None else at(t)} for k, v, t in rows], SCHEMA)


class Reference:
    """The same in plain Python, window by window."""

    def __init__(self, size: int, slide: int, delay: int, final: bool) -> None:
        self.size, self.slide, self.delay, self.final = size, slide, delay, final
        self.open: dict[tuple[str | None, int], Rows] = {}
        self.newest: int | None = None
        self.watermark: int | None = None

    def answer(self, rows: Rows) -> dict[str, Any]:
        values = [v for _, v, _ in rows if v is not None]
        last = max(((t, v) for _, v, t in rows if v is not None and t is not None), default=(0, None))[1]
        return {"n": len(rows), "sum": sum(values) if values else None, "last": last}

    def run(self, rows: Rows) -> tuple[dict[tuple[str | None, int], tuple[str, dict[str, Any]]], Rows]:
        """Return the changes by key and start of the window, and the late rows."""
        before = self.watermark
        times = [t for _, _, t in rows if t is not None]
        if times:
            self.newest = max([*times, *([] if self.newest is None else [self.newest])])
            self.watermark = max(self.newest - self.delay, self.newest - self.delay if before is None else before)
        old = {key: self.answer(them) for key, them in self.open.items()}
        late: Rows = []
        for k, v, t in rows:
            starts = [] if t is None else range(t // self.slide * self.slide, t - self.size, -self.slide)
            kept = [s for s in starts if before is None or s + self.size > before]
            for start in kept:
                self.open.setdefault((k, start), []).append((k, v, t))
            if not kept:
                late.append((k, v, t))
        new = {key: self.answer(them) for key, them in self.open.items()}
        closed = {key for key in new if self.watermark is not None and key[1] + self.size <= self.watermark}
        changes = {key: ("update" if key in old else "insert", new[key]) for key in new if old.get(key) != new[key]}
        if self.final:
            changes = {key: ("insert", new[key]) for key in closed}
        for key in closed:
            del self.open[key]
        return changes, late


ROW = st.tuples(st.sampled_from(["a", "b", None]), st.none() | st.integers(-3, 3), st.none() | st.integers(-40, 60))


@given(
    st.lists(st.lists(ROW, max_size=10), max_size=5),
    st.sampled_from([(10, 10), (10, 5), (10, 3), (7, 7), (1, 1), (10, 1)]),
    st.sampled_from([0, 5, 30]),
    st.booleans(),
)
def test_every_epoch_gives_what_plain_python_gives(
    epochs: list[Rows], window: tuple[int, int], delay: int, final: bool
) -> None:
    size, slide = window
    reference = Reference(size, slide, delay, final)
    operator = make(size, slide, delay_us=delay, emit="final" if final else "changes", before=not final)
    harness = Harness(operator, shards=2)
    shown: dict[tuple[str | None, int], dict[str, Any]] = {}
    for number, rows in enumerate(epochs, 1):
        watermark = reference.watermark
        changes, late = reference.run(rows)
        out = harness.run({"in": table(rows)})
        found = {}
        for row in out[MAIN].to_pylist():
            key = (row.pop("k"), (row.pop("window_start") - BEGIN) // timedelta(microseconds=1))
            assert row.pop("window_end") == at(key[1] + size)
            assert row.pop("_sequence") == number
            assert row.pop("_before", None) == shown.get(key)
            found[key] = (row.pop("_op"), row)
            shown[key] = row
        assert found == changes
        expected = [
            {**row, "_watermark": None if watermark is None else at(watermark)} for row in table(late).to_pylist()
        ]
        assert sorted(out[LATE].to_pylist(), key=repr) == sorted(expected, key=repr)
        ends = {key: start + size for key, start in ((key, key[1]) for key in reference.open)}
        kept = {(key[0], (key[1] - BEGIN) // timedelta(microseconds=1)): timer for key, timer in harness.timers.items()}
        assert kept == ends
        assert len(harness.state) == len(ends)


def test_a_window_closes_when_the_watermark_reaches_its_end_and_no_earlier() -> None:
    harness = Harness(make(emit="final"))
    assert harness.run({"in": table([("a", 1, 3), ("a", 2, 9)])})[MAIN].num_rows == 0
    assert len(harness.state) == 1
    out = harness.run({"in": table([("b", 5, 10)])})[MAIN].to_pylist()
    assert [(row["k"], row["n"], row["window_end"], row["_op"]) for row in out] == [("a", 2, at(10), "insert")]
    assert [key[0] for key in harness.state] == ["b"]


def test_a_row_for_a_closed_and_an_open_window_counts_in_the_open_one() -> None:
    harness = Harness(make(10, 5))
    harness.run({"in": table([("a", 1, 12)])})
    out = harness.run({"in": table([("a", 1, 8), ("a", 1, 4)])})
    assert [(row["window_start"], row["n"]) for row in out[MAIN].to_pylist()] == [(at(5), 2)]
    assert [row["t"] for row in out[LATE].to_pylist()] == [at(4)]


def test_the_slowest_input_that_gave_rows_holds_the_watermark() -> None:
    harness = Harness(make(inputs=("a", "b"), delay_us=2))
    harness.run({"a": table([("x", 1, 100)])})
    assert harness.watermark == 98
    harness.run({"b": table([("x", 1, 99)])})
    assert harness.watermark == 98
    harness.run({"b": table([("x", 1, 101)]), "a": table([("x", 1, None)])})
    assert harness.watermark == 98
    harness.run({"a": table([("x", 1, 200)])})
    assert harness.watermark == 99


def test_late_rows_may_be_late_again() -> None:
    first = make()
    settings = {**first.settings, "window": {"size_us": 3}}
    inputs = {"w.late": first.output_schema(LATE)}
    second = build_operator(OperatorOptions("again", "aggregate", ("w.late",), settings), inputs, ())
    assert second.output_schema(LATE).names == ["k", "v", "t", "_watermark"]
    one, two = Harness(first), Harness(second)
    given_rows: list[Rows] = [[("a", 1, 100)], [("a", 1, 50), ("b", 2, 60)], [("a", 1, 40)]]
    for rows in given_rows:
        out = one.run({"in": table(rows)})
        again = two.run({"w.late": out[LATE]})
    assert out[LATE].column("_watermark").to_pylist() == [at(100)]
    assert again[LATE].column("_watermark").to_pylist() == [at(60)]


@pytest.mark.parametrize("emit", ["changes", "final"])
def test_a_timer_of_a_window_that_is_gone_gives_nothing(emit: str) -> None:
    operator = make(emit=emit)
    keys = pa.table({"k": ["a"], WINDOW_START: pa.array([0], SCHEMA.field("t").type)})
    state = pa.table([pa.nulls(1, f.type) for f in operator.state_schema], schema=operator.state_schema)
    batch = Batch(keys, state, np.array([False]), np.array([True]), {}, {})
    result = operator.fold(batch, EpochContext("p", "w", 3, BEGIN, late_before=5, watermark=50))
    assert not len(result.changed)
    assert not len(result.removed)
    assert result.output[MAIN].num_rows == 0


def test_no_keys_make_one_total_per_window() -> None:
    harness = Harness(make(keys=[]), shards=2)
    out = harness.run({"in": table([("a", 1, 3), ("b", 2, 4), ("c", 4, 12)])})[MAIN].to_pylist()
    assert [(row["window_start"], row["sum"]) for row in out] == [(at(0), 3), (at(10), 4)]


def test_what_identifies_a_row() -> None:
    operator = make()
    assert operator.state_key.names == ["k", "window_start"]
    assert operator.output_key == ("k", "window_start")
    assert operator.times == {"in": "t"}
    assert operator.output_schema(LATE).names == ["k", "v", "t", "_watermark"]


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"time": None}, "no time"),
        ({"window": {"size_us": 5, "slide_us": 6}}, "slide"),
        ({"window": {"size_us": -5}}, "slide"),
        ({"emit": "final", "before": True}, "before"),
        ({"keys": ["window_start"]}, "window_start"),
    ],
)
def test_what_does_not_fit_is_refused(wrong: dict[str, Any], message: str) -> None:
    aggregates = [{"name": "n", "function": "count"}]
    settings = {"keys": ["k"], "aggregates": aggregates, "time": "t", "window": {"size_us": 5}, **wrong}
    schema = SCHEMA.append(pa.field("window_start", pa.int64()))
    with pytest.raises(ConfigError, match=message):
        build_operator(OperatorOptions("w", "aggregate", ("in",), settings), {"in": schema}, ())


def _epochs() -> list[Epoch]:
    rng = np.random.default_rng(5)
    epochs: list[Epoch] = []
    for number in range(6):
        times = rng.integers(number * 20, number * 20 + 30, 60)
        rows: Rows = [(str(rng.choice(["a", "b", "c"])), int(rng.integers(0, 9)), int(t)) for t in times]
        epochs.append({"in": table(rows)})
    return epochs


class TestChanges(OperatorConformance):
    @pytest.fixture
    def operator(self) -> Any:
        return make(20, 5, delay_us=30, before=True)

    @pytest.fixture
    def epochs(self) -> list[Epoch]:
        return _epochs()


class TestFinal(OperatorConformance):
    @pytest.fixture
    def operator(self) -> Any:
        return make(20, delay_us=30, emit="final")

    @pytest.fixture
    def epochs(self) -> list[Epoch]:
        return _epochs()
