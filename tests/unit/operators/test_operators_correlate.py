"""Alerts, epoch by epoch, against one batch computation over all rows that were not late."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from datetime import UTC, datetime, timedelta
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from firnline.errors import ConfigError
from firnline.operators.base import LATE, MAIN
from firnline.operators.loading import build_operator
from firnline.options import OperatorOptions
from firnline.testing.operators import Epoch, Harness, OperatorConformance, upsert

BEGIN = datetime(1970, 1, 1, tzinfo=UTC)
SCHEMA = pa.schema([("k", pa.string()), ("t", pa.timestamp("us", "UTC"))])
NAMES = ("web", "api", "db")  # not in the order of the alphabet

Row = tuple[str | None, int, str]  # key, time, input
Alert = tuple[int, list[str], int]  # end, inputs, rows


def make(window: int = 10, min_inputs: int = 2, names: tuple[str, ...] = NAMES, **more: Any) -> Any:
    settings = {"keys": ["k"], "time": "t", "window_us": window, "min_inputs": min_inputs, **more}
    return build_operator(OperatorOptions("alerts", "correlate", names, settings), dict.fromkeys(names, SCHEMA), ())


def at(micros: int) -> datetime:
    return BEGIN + timedelta(microseconds=micros)


def micros(time: datetime) -> int:
    return (time - BEGIN) // timedelta(microseconds=1)


def epoch(rows: Iterable[tuple[str | None, int | None, str]]) -> Epoch:
    parts: dict[str, list[dict[str, Any]]] = defaultdict(list)
    for key, time, name in rows:
        parts[name].append({"k": key, "t": None if time is None else at(time)})
    return {name: pa.Table.from_pylist(them, SCHEMA) for name, them in parts.items()}


def batch(rows: Iterable[Row], window: int, min_inputs: int) -> dict[tuple[str | None, int], Alert]:
    """All alerts in all rows, by key and start."""
    keys: dict[str | None, list[tuple[int, str]]] = defaultdict(list)
    for key, time, name in rows:
        keys[key].append((time, name))
    found: dict[tuple[str | None, int], Alert] = {}
    for key, seen in keys.items():
        run: list[int] = []
        runs: list[list[int]] = [run]
        for step in sorted({time for time, _ in seen}):
            names = {name for time, name in seen if step - window < time <= step}
            if len(names) < min_inputs or (run and step - run[-1] >= window):
                run = []
                runs.append(run)
            if len(names) >= min_inputs:
                run.append(step)
        for run in filter(None, runs):
            start, end = min(time for time, _ in seen if time > run[0] - window), run[-1]
            inside = [name for time, name in seen if start <= time <= end]
            found[key, start] = (end, sorted(set(inside)), len(inside))
    return found


def alerts(table: dict[tuple[Any, ...], dict[str, Any]]) -> dict[tuple[str | None, int], Alert]:
    return {
        (row["k"], micros(row["alert_start"])): (micros(row["alert_end"]), row["inputs"], row["rows"])
        for row in table.values()
    }


ROWS = st.tuples(st.sampled_from(["a", "b", None]), st.none() | st.integers(0, 60), st.sampled_from(NAMES))
DRIFTING = st.lists(st.lists(ROWS, max_size=14), max_size=6)


@given(
    DRIFTING,
    st.integers(0, 40),
    st.sampled_from([1, 3, 10, 25]),
    st.sampled_from([1, 2, 3]),
    st.sampled_from([0, 8]),
    st.sampled_from([0, 15]),
)
@settings(max_examples=200)
def test_after_every_epoch_the_table_is_that_of_the_batch(
    epochs: list[list[tuple[str | None, int | None, str]]],
    drift: int,
    window: int,
    min_inputs: int,
    delay: int,
    retain: int,
) -> None:
    operator = make(window, min_inputs, delay_us=delay, retain_us=retain)
    harness = Harness(operator, shards=2)
    taken: list[Row] = []
    table: dict[tuple[Any, ...], dict[str, Any]] = {}
    for number, given_rows in enumerate(epochs):
        rows = [(key, None if time is None else time + number * drift, name) for key, time, name in given_rows]
        before = harness.watermark
        border = -(10**9) if before is None else before - retain
        late = [row for row in rows if row[1] is None or row[1] < border]
        taken += [(key, time, name) for key, time, name in rows if time is not None and time >= border]
        out = harness.run(epoch(rows))
        upsert(table, out[MAIN], operator.output_key)
        assert alerts(table) == batch(taken, window, min_inputs)
        told = [(r["k"], None if r["t"] is None else micros(r["t"]), r["_input"]) for r in out[LATE].to_pylist()]
        assert sorted(told, key=repr) == sorted(late, key=repr)
        _check_state(harness, taken, window, retain)


def _check_state(harness: Harness, taken: list[Row], window: int, retain: int) -> None:
    """Rows are kept exactly while a later row can be in a window with them, as seen when the key was last touched."""
    final = None if harness.watermark is None else harness.watermark - retain
    for (key,), state in harness.state.items():
        until = state["final_until"]
        assert until is None or (final is not None and until <= final)
        kept = sorted((time, NAMES.index(name)) for k, time, name in taken if k == key)
        kept = [pair for pair in kept if until is None or pair[0] > until - window]
        assert list(zip(state["times"], state["inputs"], strict=True)) == kept
        assert harness.timers[(key,)] == kept[-1][0] + window + retain
    for key in {key for key, _, _ in taken}:
        newest = max(time for k, time, _ in taken if k == key)
        assert ((key,) in harness.state) == (final is None or newest + window > final)


def run(operator: Any, *epochs: list[Row]) -> list[list[tuple[str, int, int, int]]]:
    """Return per epoch what happened to which alert: op, start, end, rows."""
    return [
        [
            (row["_op"], micros(row["alert_start"]), micros(row["alert_end"]), row["rows"])
            for row in out[MAIN].to_pylist()
        ]
        for out in Harness(operator).run_all([epoch(rows) for rows in epochs])
    ]


def test_an_alert_begins_grows_and_ends() -> None:
    assert run(
        make(),
        [("a", 1, "web")],
        [("a", 4, "api")],
        [("a", 9, "api"), ("a", 5, "db")],
        [("a", 30, "api")],
    ) == [[], [("insert", 1, 4, 2)], [("update", 1, 9, 4)], []]


def test_rows_at_the_same_time_see_each_other() -> None:
    assert run(make(1, 3), [("a", 5, "web"), ("a", 5, "db"), ("a", 5, "api")]) == [[("insert", 5, 5, 3)]]


def test_the_window_is_open_at_its_far_end() -> None:
    assert run(make(10), [("a", 0, "web"), ("a", 10, "db")]) == [[]]
    assert run(make(10), [("b", 0, "web"), ("b", 9, "db")]) == [[("insert", 0, 9, 2)]]


def test_a_row_out_of_order_splits_an_alert() -> None:
    far: list[Row] = [("a", 10, "web"), ("a", 20, "api"), ("a", 115, "web"), ("a", 115, "api")]
    assert run(make(100, delay_us=500), far, [("a", 112, "api")]) == [
        [("insert", 10, 115, 4)],
        [("update", 10, 20, 2), ("insert", 20, 115, 4)],
    ]


def test_a_row_out_of_order_moves_the_start_by_delete_and_insert() -> None:
    operator = make(10, delay_us=50)
    assert run(operator, [("a", 5, "web"), ("a", 8, "api")], [("a", 3, "web")]) == [
        [("insert", 5, 8, 2)],
        [("insert", 3, 8, 3), ("delete", 5, 8, 2)],
    ]


def test_an_alert_does_not_go_on_after_a_window_of_silence() -> None:
    together: list[Row] = [("a", 0, "web"), ("a", 0, "db"), ("a", 10, "web"), ("a", 10, "db")]
    assert run(make(10), together) == [[("insert", 0, 0, 2), ("insert", 10, 10, 2)]]
    assert run(make(11), together) == [[("insert", 0, 10, 4)]]


def test_an_open_alert_is_carried_past_what_is_forgotten() -> None:
    operator = make(5)
    harness = Harness(operator)
    table: dict[tuple[Any, ...], dict[str, Any]] = {}
    for number in range(200):
        rows = [("a", 2 * number, name) for name in NAMES]
        upsert(table, harness.run(epoch(rows))[MAIN], operator.output_key)
        assert len(harness.state[("a",)]["times"]) <= 9
    assert alerts(table) == {("a", 0): (398, sorted(NAMES), 600)}


def test_idle_keys_are_forgotten() -> None:
    harness = Harness(make(10, retain_us=5))
    harness.run(epoch(("a", 10, name) for name in NAMES))
    harness.run(epoch(("b", 24, name) for name in NAMES))
    assert set(harness.state) == {("a",), ("b",)}
    harness.run(epoch(("b", 25, name) for name in NAMES))
    assert set(harness.state) == {("b",)}


def test_a_key_that_is_due_too_early_is_kept_and_due_again() -> None:
    short = Harness(make(10))
    short.run(epoch(("a", 10, name) for name in NAMES))
    longer = Harness.restored(make(100), short.snapshot())
    longer.run(epoch(("b", 25, name) for name in NAMES))
    assert longer.timers == {("a",): 110, ("b",): 125}
    longer.run(epoch(("b", 110, name) for name in NAMES))
    assert set(longer.state) == {("b",)}


def test_all_inputs_must_speak_by_default() -> None:
    names = ("a", "b", "c")
    options = OperatorOptions("alerts", "correlate", names, {"keys": ["k"], "time": "t", "window_us": 10})
    operator = build_operator(options, dict.fromkeys(names, SCHEMA), ())
    assert run(operator, [("x", 1, "a"), ("x", 2, "b")]) == [[]]
    assert run(operator, [("x", 1, "a"), ("x", 2, "b"), ("x", 3, "c")]) == [[("insert", 1, 3, 3)]]


def test_late_rows_keep_the_columns_of_all_inputs() -> None:
    inputs = {
        "a": SCHEMA.append(pa.field("v", pa.int32())).append(pa.field("odd", pa.int64())),
        "b": SCHEMA.append(pa.field("v", pa.string())).append(pa.field("odd", pa.list_(pa.int64()))),
    }
    settings_ = {"keys": ["k"], "time": "t", "window_us": 10}
    operator = build_operator(OperatorOptions("alerts", "correlate", ("a", "b"), settings_), inputs, ())
    rows = pa.Table.from_pylist([{"k": "x", "t": None, "v": 4, "odd": 5}], inputs["a"])
    assert Harness(operator).run({"a": rows})[LATE].to_pylist() == [
        {"k": "x", "t": None, "v": "4", "_input": "a", "_watermark": None}
    ]


def test_thirty_two_inputs_are_told_apart() -> None:
    names = tuple(f"n{number:02}" for number in range(32))
    rows = [("a", number, name) for number, name in enumerate(names)]
    table: dict[tuple[Any, ...], dict[str, Any]] = {}
    operator = make(32, 32, names)
    upsert(table, Harness(operator).run(epoch(rows))[MAIN], operator.output_key)
    assert alerts(table) == {("a", 0): (31, list(names), 32)}
    with pytest.raises(ConfigError, match="32 at most"):
        make(10, 2, (*names, "more"))


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"min_inputs": 4}, "min_inputs is 4"),
        ({"window": 0}, "window"),
        ({"keys": ["x"]}, "'x'"),
        ({"time": "k"}, "'k'"),
    ],
)
def test_what_does_not_fit_is_refused(wrong: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        make(**wrong)


@pytest.mark.parametrize("retain", [0, 1000])
def test_skewed_keys_in_many_epochs(retain: int) -> None:
    rng = np.random.default_rng(11)
    operator = make(40, 3, delay_us=100, retain_us=retain)
    harness = Harness(operator, shards=3)
    table: dict[tuple[Any, ...], dict[str, Any]] = {}
    taken: list[Row] = []
    for number in range(12):
        keys = np.where(rng.random(150) < 0.5, 0, rng.integers(0, 40, 150))
        times = number * 50 + rng.integers(0, 120, 150)
        rows = [(str(k), int(t), NAMES[n]) for k, t, n in zip(keys, times, rng.integers(0, 3, 150), strict=True)]
        border = -1 if harness.watermark is None else harness.watermark - retain
        taken += [row for row in rows if row[1] >= border]
        upsert(table, harness.run(epoch(rows))[MAIN], operator.output_key)
    assert alerts(table) == batch(taken, 40, 3)


class TestConformance(OperatorConformance):
    @pytest.fixture
    def operator(self) -> Any:
        return make(10, 2, delay_us=30)

    @pytest.fixture
    def epochs(self) -> list[Epoch]:
        rng = np.random.default_rng(2)
        return [
            epoch(
                (str(rng.choice(["a", "b", "c", "d"])), int(time), str(rng.choice(NAMES)))
                for time in rng.integers(number * 20, number * 20 + 30, 25)
            )
            for number in range(6)
        ]
