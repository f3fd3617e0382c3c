"""The operator that lets the first row of a key pass, against plain Python."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from firnline.errors import ConfigError
from firnline.operators.base import MAIN
from firnline.operators.loading import build_operator
from firnline.options import OperatorOptions
from firnline.testing.operators import Epoch, Harness, OperatorConformance

SCHEMA = pa.schema([("k", pa.string()), ("g", pa.int64()), ("v", pa.int64()), ("t", pa.timestamp("us", "UTC"))])
BEGIN = datetime(1970, 1, 1, tzinfo=UTC)
Row = dict[str, Any]


def make(inputs: dict[str, pa.Schema] | None = None, **more: Any) -> Any:
    inputs = inputs or {"in": SCHEMA}
    return build_operator(OperatorOptions("once", "deduplicate", tuple(inputs), {"keys": ["k"], **more}), inputs, ())


def at(micros: int) -> datetime:
    return BEGIN + timedelta(microseconds=micros)


def table(rows: list[Row]) -> pa.Table:
    return pa.Table.from_pylist(rows, SCHEMA)


def row(key: str | None, value: int, time: int | None = None) -> Row:
    return {"k": key, "g": None, "v": value, "t": None if time is None else at(time)}


ROWS = st.lists(st.builds(row, st.sampled_from(["a", "b", "c", None]), st.integers(0, 9), st.integers(0, 50)))


@given(st.lists(ROWS, max_size=5), st.none() | st.integers(1, 30), st.sampled_from([0, 10]))
def test_the_first_row_of_a_key_passes_until_it_is_forgotten(
    epochs: list[list[Row]], ttl: int | None, delay: int
) -> None:
    operator = make(time="t", delay_us=delay, ttl_us=ttl)
    harness = Harness(operator, shards=1)
    known: dict[str | None, tuple[int, int]] = {}
    newest = -(10**9)
    for rows in epochs:
        expected = []
        for one in rows:
            time = (one["t"] - BEGIN) // timedelta(microseconds=1)
            newest = max(newest, time)
            if one["k"] in known:
                first, dropped = known[one["k"]]
                known[one["k"]] = (first, dropped + 1)
            else:
                known[one["k"]] = (time, 0)
                expected.append(one)
        if ttl is not None:
            known = {key: (first, n) for key, (first, n) in known.items() if first + ttl > newest - delay}
        assert harness.run({"in": table(rows)})[MAIN].to_pylist() == expected
        assert {key[0]: (s["first_time"], s["dropped"]) for key, s in harness.state.items()} == known
        assert harness.timers == ({} if ttl is None else {(key,): first + ttl for key, (first, _) in known.items()})


def test_the_order_of_inputs_decides_who_is_first() -> None:
    other = pa.schema([("v", pa.int32()), ("k", pa.string()), ("more", pa.bool_())])
    operator = make({"b": other, "a": SCHEMA})
    rows: Epoch = {
        "a": table([row("x", 1), row("y", 2)]),
        "b": pa.Table.from_pylist([{"k": "x", "v": 3, "more": True}], other),
    }
    out = Harness(operator).run(rows)[MAIN]
    assert out.schema.names == ["v", "k", "more", "g", "t"]
    assert out.schema.field("v").type == pa.int64()
    assert [(r["k"], r["v"], r["more"]) for r in out.to_pylist()] == [("x", 3, True), ("y", 2, None)]


def test_a_row_without_a_time_counts_from_the_watermark() -> None:
    harness = Harness(make(time="t", ttl_us=10))
    harness.run({"in": table([row("x", 1)])})
    assert harness.state == {("x",): {"first_time": None, "dropped": 0}}
    assert not harness.timers
    harness.run({"in": table([row("x", 1), row("y", 1), row("z", 1, 7)])})
    assert harness.timers == {("x",): 17, ("y",): 17, ("z",): 17}
    harness.run({"in": table([row("z", 1, 17)])})
    assert not harness.state


def test_without_time_nothing_is_forgotten() -> None:
    operator = make()
    harness = Harness(operator)
    for number in range(3):
        out = harness.run({"in": table([row("x", number, number * 100)])})[MAIN]
        assert out.num_rows == (number == 0)
    assert harness.state == {("x",): {"first_time": None, "dropped": 2}}
    assert operator.times == {}
    assert operator.output_key == ()


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"ttl_us": 5}, "no time"),
        ({"time": "v"}, "timestamp"),
        ({"keys": ["kay"]}, "'kay'"),
    ],
)
def test_what_does_not_fit_is_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        make(**settings)


def test_inputs_whose_columns_do_not_go_together_are_refused() -> None:
    other = pa.schema([("k", pa.string()), ("v", pa.list_(pa.int64()))])
    with pytest.raises(ConfigError, match="'v' has types"):
        make({"a": SCHEMA, "b": other})


class TestConformance(OperatorConformance):
    @pytest.fixture
    def operator(self) -> Any:
        return make(keys=["k", "g"], time="t", ttl_us=10_000)

    @pytest.fixture
    def epochs(self) -> list[Epoch]:
        rng = np.random.default_rng(1)
        rows = [
            {"k": str(rng.integers(0, 9)), "g": int(rng.integers(0, 3)), "v": n, "t": at(int(rng.integers(0, 99)))}
            for n in range(90)
        ]
        return [{"in": table(rows[start : start + 30])} for start in (0, 30, 60)]
