"""Aggregates without windows, against plain Python."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from decimal import ROUND_HALF_UP, Decimal
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from firnline.errors import ConfigError, SchemaError
from firnline.operators.base import LATE, MAIN
from firnline.operators.loading import build_operator
from firnline.options import OperatorOptions
from firnline.testing.operators import Epoch, Harness, OperatorConformance, Row, assert_like, final_rows

SCHEMA = pa.schema(
    [
        ("k", pa.string()),
        ("g", pa.int32()),
        ("i", pa.int64()),
        ("d", pa.decimal128(10, 2)),
        ("f", pa.float64()),
        ("s", pa.string()),
        ("t", pa.timestamp("us", "UTC")),
        ("b", pa.bool_()),
    ]
)
ALL = [
    {"name": "n", "function": "count"},
    {"name": "n_s", "function": "count", "column": "s"},
    {"name": "sum_i", "function": "sum", "column": "i"},
    {"name": "sum_d", "function": "sum", "column": "d"},
    {"name": "sum_f", "function": "sum", "column": "f"},
    {"name": "avg_i", "function": "avg", "column": "i"},
    {"name": "avg_d", "function": "avg", "column": "d"},
    {"name": "avg_f", "function": "avg", "column": "f"},
    {"name": "min_s", "function": "min", "column": "s"},
    {"name": "max_s", "function": "max", "column": "s"},
    {"name": "min_d", "function": "min", "column": "d"},
    {"name": "max_f", "function": "max", "column": "f"},
    {"name": "min_b", "function": "min", "column": "b"},
    {"name": "max_t", "function": "max", "column": "t"},
    {"name": "first_i", "function": "first", "column": "i"},
    {"name": "last_s", "function": "last", "column": "s"},
    {"name": "last_d", "function": "last", "column": "d", "order_by": "s"},
]


def make(
    aggregates: Sequence[dict[str, Any]],
    keys: Sequence[str] = ("k", "g"),
    inputs: Sequence[str] = ("in",),
    schema: pa.Schema = SCHEMA,
    **more: Any,
) -> Any:
    settings = {"keys": list(keys), "aggregates": list(aggregates), **more}
    options = OperatorOptions("totals", "aggregate", tuple(inputs), settings)
    return build_operator(options, dict.fromkeys(inputs, schema), ())


def table(rows: Iterable[Row]) -> pa.Table:
    return pa.Table.from_pylist(list(rows), SCHEMA)


def exactly(number: int, scale: int) -> Decimal:
    """Return number / 10**scale, of as many digits as it has."""
    return Decimal(f"{number}E-{scale}")


def answers(rows: Sequence[Row]) -> Row:
    """What SQL says of the rows of one key."""

    def values(column: str) -> list[Any]:
        return [row[column] for row in rows if row[column] is not None]

    def maybe(function: Callable[[list[Any]], Any], column: str) -> Any:
        return function(values(column)) if values(column) else None

    def pick(function: Callable[[Any], Any], column: str, order: str) -> Any:
        pairs = [(r[order], r[column]) for r in rows if r[order] is not None and r[column] is not None]
        return function(pairs)[1] if pairs else None

    def mean(them: list[Decimal]) -> Decimal:
        return (sum(them, Decimal(0)) / len(them)).quantize(Decimal("0.000001"), ROUND_HALF_UP)

    return {
        "n": len(rows),
        "n_s": len(values("s")),
        "sum_i": maybe(sum, "i"),
        "sum_d": maybe(sum, "d"),
        "sum_f": maybe(math.fsum, "f"),
        "avg_i": maybe(lambda them: sum(them) / len(them), "i"),
        "avg_d": maybe(mean, "d"),
        "avg_f": maybe(lambda them: math.fsum(them) / len(them), "f"),
        "min_s": maybe(min, "s"),
        "max_s": maybe(max, "s"),
        "min_d": maybe(min, "d"),
        "max_f": maybe(max, "f"),
        "min_b": maybe(min, "b"),
        "max_t": maybe(max, "t"),
        "first_i": pick(min, "i", "t"),
        "last_s": pick(max, "s", "t"),
        "last_d": pick(max, "d", "s"),
    }


KEYS = st.sampled_from(["a", "b", "ß", "", None])
TIMES = st.integers(0, 3).map(lambda n: pa.scalar(n, pa.timestamp("us", "UTC")).as_py())
ROWS = st.fixed_dictionaries(
    {
        "k": KEYS,
        "g": st.sampled_from([1, 2, None]),
        "i": st.none() | st.integers(-(2**40), 2**40) | st.integers(-2, 2),
        "d": st.none() | st.decimals(-99999999, 99999999, places=2),
        "f": st.none() | st.integers(-(2**20), 2**20).map(lambda n: n / 4),
        "s": st.none() | st.text("abzß\U0001f600", max_size=2),
        "t": st.none() | TIMES,
        "b": st.none() | st.booleans(),
    }
)
EPOCHS = st.lists(st.lists(ROWS, max_size=12), min_size=1, max_size=4)


@given(EPOCHS)
def test_every_epoch_tells_what_changed_in_it(epochs: list[list[Row]]) -> None:
    operator = make(ALL, time="t", before=True)
    harness = Harness(operator, shards=2)
    seen: dict[tuple[Any, Any], list[Row]] = {}
    for number, rows in enumerate(epochs, 1):
        old = {key: answers(them) for key, them in seen.items()}
        for row in rows:
            seen.setdefault((row["k"], row["g"]), []).append(row)
        new = {key: answers(them) for key, them in seen.items()}
        told = {(row["k"], row["g"]): row for row in harness.run({"in": table(rows)})[MAIN].to_pylist()}
        assert told.keys() == {key for key in new if old.get(key) != new[key]}
        for key, row in told.items():
            assert row["_op"] == ("update" if key in old else "insert")
            assert row["_sequence"] == number
            assert row["_before"] == old.get(key)
            assert {name: row[name] for name in new[key]} == new[key]


@given(EPOCHS, st.randoms())
def test_the_order_of_rows_does_not_matter(epochs: list[list[Row]], random: Any) -> None:
    operator = make(ALL, time="t")
    one, other = Harness(operator), Harness(operator)
    for rows in epochs:
        shuffled = random.sample(rows, len(rows))
        expected = one.run({"in": table(rows)})[MAIN].to_pylist()
        found = other.run({"in": table(shuffled)})[MAIN].to_pylist()
        assert sorted(found, key=repr) == sorted(expected, key=repr)
    assert one.state == other.state


@given(st.lists(st.floats(allow_nan=True, allow_infinity=True), min_size=1, max_size=8), st.randoms())
def test_sums_and_picks_of_any_floats_do_not_depend_on_order(values: list[float], random: Any) -> None:
    functions = ("sum", "min", "max", "avg")
    operator = make([{"name": f, "function": f, "column": "f"} for f in functions], keys=[])
    found = [Harness(operator).run({"in": table({"f": v} for v in them)})[MAIN] for them in (values, values[::-1])]
    assert repr(found[0].to_pylist()) == repr(found[1].to_pylist())
    row = found[0].to_pylist()[0]
    ordered = sorted(values, key=lambda v: (math.isnan(v), v, math.copysign(1, v)))
    assert repr(row["min"]) == repr(ordered[0])
    assert repr(row["max"]) == repr(ordered[-1])


def test_an_epoch_that_changes_no_answer_gives_nothing_but_may_change_state() -> None:
    operator = make([{"name": "avg", "function": "avg", "column": "i"}], keys=["k"])
    harness = Harness(operator)
    harness.run({"in": table([{"k": "a", "i": 5}])})
    assert harness.run({"in": table([{"k": "a", "i": 5}, {"k": "a"}])})[MAIN].num_rows == 0
    assert harness.state == {("a",): {"avg_sum": Decimal(10), "avg_count": 2}}


def test_a_key_with_nothing_but_null_is_inserted_with_null() -> None:
    operator = make([{"name": "sum", "function": "sum", "column": "i"}], keys=["k"])
    out = Harness(operator).run({"in": table([{"k": None}])})[MAIN].to_pylist()
    assert out == [{"k": None, "sum": None, "_op": "insert", "_sequence": 1}]


@pytest.mark.parametrize("function", ["sum", "min", "avg"])
def test_the_first_value_of_a_key_is_a_change(function: str) -> None:
    harness = Harness(make([{"name": "x", "function": function, "column": "f"}], keys=["k"], before=True))
    harness.run({"in": table([{"k": "a"}])})
    out = harness.run({"in": table([{"k": "a", "f": 0.0}])})[MAIN].to_pylist()
    assert out == [{"k": "a", "x": 0.0, "_op": "update", "_sequence": 2, "_before": {"x": None}}]


def test_no_keys_make_one_total() -> None:
    operator = make([{"name": "n", "function": "count"}], keys=[])
    assert operator.output_schema().names == ["n", "_op", "_sequence"]
    harness = Harness(operator, shards=3)
    harness.run({"in": table([{"k": "a"}] * 3)})
    assert harness.run({"in": table([{"k": "b"}] * 2)})[MAIN].to_pylist() == [{"n": 5, "_op": "update", "_sequence": 2}]


def test_sums_of_whole_numbers_are_exact_to_the_last_one() -> None:
    operator = make([{"name": "sum", "function": "sum", "column": "i"}], keys=[])
    top = 2**63 - 1
    harness = Harness(operator)
    out = harness.run({"in": table([{"i": top}, {"i": top}, {"i": -top}])})[MAIN].to_pylist()
    assert out[0]["sum"] == top
    assert harness.run({"in": table([{"i": -top}, {"i": -top}, {"i": -1}])})[MAIN].to_pylist()[0]["sum"] == -(2**63)
    with pytest.raises(SchemaError, match="'i' in 'sum' is too large"):
        harness.run({"in": table([{"i": -1}])})


def test_means_of_large_whole_numbers_do_not_overflow() -> None:
    operator = make([{"name": "avg", "function": "avg", "column": "i"}], keys=[])
    out = Harness(operator).run_all([{"in": table([{"i": 2**62 + n} for n in range(9)])}] * 2)
    assert final_rows(operator, out) == [{"avg": float(2**62 + 4)}]


def test_sums_of_decimals_are_exact_and_overflow_loudly() -> None:
    schema = pa.schema([("d", pa.decimal128(38, 2))])
    operator = make([{"name": "sum", "function": "sum", "column": "d"}], keys=[], schema=schema)
    top = exactly(10**38 - 1, 2)
    harness = Harness(operator)
    rows = [{"d": top}, {"d": top}, {"d": exactly(1 - 10**38, 2)}, {"d": None}]
    out = harness.run({"in": pa.Table.from_pylist(rows, schema)})[MAIN].to_pylist()
    assert out[0]["sum"] == top
    with pytest.raises(SchemaError, match="too large"):
        harness.run({"in": pa.Table.from_pylist([{"d": Decimal("0.01")}], schema)})


@pytest.mark.parametrize(
    ("precision", "scale", "kind"),
    [(10, 2, pa.decimal128(14, 6)), (38, 2, pa.decimal128(38, 2)), (36, 6, pa.decimal128(38, 8))],
)
def test_means_of_decimals_round_half_up(precision: int, scale: int, kind: pa.DataType) -> None:
    schema = pa.schema([("d", pa.decimal128(precision, scale))])
    operator = make([{"name": "avg", "function": "avg", "column": "d"}], keys=[], schema=schema)
    for values in ([1, 1, 3], [-1, -1, -3], [1, 2], [-1, -2], [10**precision // 2 - 1, 10**precision // 2 - 2]):
        them = [exactly(v, scale) for v in values]
        out = Harness(operator).run({"in": pa.Table.from_pylist([{"d": v} for v in them], schema)})[MAIN]
        assert out.schema.field("avg").type == kind
        total, count = sum(values) * 10 ** (kind.scale - scale), len(values)
        rounded = (2 * abs(total) + count) // (2 * count)  # half up, in whole numbers
        assert out.to_pylist()[0]["avg"] == exactly(rounded if total > 0 else -rounded, kind.scale)


def test_ties_of_first_and_last_are_decided_by_the_value() -> None:
    aggregates = [{"name": f, "function": f, "column": "s", "order_by": "g"} for f in ("first", "last")]
    operator = make(aggregates, keys=["k"])
    rows = [{"k": "a", "g": 1, "s": s} for s in ("m", "c", "x")]
    for cut in range(4):
        outputs = Harness(operator).run_all([{"in": table(rows[cut:])}, {"in": table(rows[:cut])}])
        assert final_rows(operator, outputs) == [{"k": "a", "first": "c", "last": "x"}]


def test_skew_and_many_keys() -> None:
    rng = np.random.default_rng(7)
    keys = np.where(rng.random(20_000) < 0.9, 0, rng.integers(0, 5_000, 20_000))
    values = rng.integers(-(10**12), 10**12, 20_000)
    rows = pa.table({"k": pa.array(keys).cast(pa.string()), "i": values})
    schema = rows.schema
    operator = make(
        [{"name": "n", "function": "count"}, {"name": "sum", "function": "sum", "column": "i"}], ["k"], schema=schema
    )
    outputs = Harness(operator).run_all([{"in": rows.slice(0, 9_000)}, {"in": rows.slice(9_000)}])
    expected = [
        {"k": str(key), "n": int((keys == key).sum()), "sum": int(values[keys == key].sum())} for key in np.unique(keys)
    ]
    assert final_rows(operator, outputs) == sorted(expected, key=lambda row: repr(list(row.values())))


def test_several_inputs_are_one_and_may_lack_a_column() -> None:
    bare = pa.schema([("k", pa.string())])
    options = OperatorOptions(
        "totals",
        "aggregate",
        ("a", "b"),
        {
            "keys": ["k"],
            "aggregates": [{"name": "n", "function": "count"}, {"name": "s", "function": "sum", "column": "i"}],
        },
    )
    operator = build_operator(options, {"a": bare, "b": SCHEMA}, ())
    rows: Epoch = {"a": pa.table({"k": ["x", "y"]}), "b": table([{"k": "x", "i": 4}])}
    assert final_rows(operator, [Harness(operator).run(rows)]) == [
        {"k": "x", "n": 2, "s": 4},
        {"k": "y", "n": 1, "s": None},
    ]


def test_nothing_is_late_without_a_window() -> None:
    harness = Harness(make([{"name": "n", "function": "count"}], keys=["k"], time="t"))
    for second in (5, 1):
        out = harness.run({"in": table([{"k": "a", "t": pa.scalar(second, pa.timestamp("s", "UTC")).as_py()}])})
        assert out[LATE].num_rows == 0
        assert out[MAIN].num_rows == 1
    assert harness.watermark == 5_000_000


MEAN = {"name": "i", "function": "avg", "column": "i"}
BAD: list[tuple[dict[str, Any], str, str]] = [
    ({"keys": ["kk"]}, "input 'in' has no column 'kk'", "There are"),
    ({"keys": ["k", "K"]}, "'K'", "'k'"),
    ({"keys": ["k", "k"]}, "two columns 'k'", "name"),
    ({"time": "s"}, "'s' is string, but event time must be a timestamp", "timestamp"),
    ({"aggregates": []}, "no aggregates", "aggregates"),
    ({"aggregates": [{"name": "x", "function": "median", "column": "i"}]}, "'median'", "count"),
    ({"aggregates": [{"name": "x", "function": "sum"}]}, "needs a column", "column"),
    ({"aggregates": [{"name": "x", "function": "sum", "column": "s"}]}, "'s' .string. is not possible", "type"),
    ({"aggregates": [{"name": "x", "function": "max", "column": "l"}]}, "no order", "column"),
    ({"aggregates": [{"name": "x", "function": "last", "column": "i"}]}, "needs an order", "order_by"),
    ({"aggregates": [{"name": "x", "function": "last", "column": "i", "order_by": "l"}]}, "gives", "Order"),
    ({"aggregates": [{"name": "x", "function": "count", "column": "y"}]}, "no column 'y'", "There are: b, d"),
    ({"aggregates": [{"name": "k", "function": "count"}]}, "two columns 'k'", "name"),
    ({"aggregates": [{"name": "i_sum", "function": "count"}, MEAN]}, "i_sum", "name"),
    ({"keys": ["l"]}, "cannot be a key", "sql"),
]  # fmt: skip


@pytest.mark.parametrize(("wrong", "message", "hint"), BAD)
def test_what_does_not_fit_the_columns_is_refused(wrong: dict[str, Any], message: str, hint: str) -> None:
    schema = SCHEMA.append(pa.field("l", pa.list_(pa.int64())))
    settings = {"keys": ["k"], "aggregates": [{"name": "n", "function": "count"}], **wrong}
    with pytest.raises(ConfigError, match=message) as caught:
        build_operator(OperatorOptions("totals", "aggregate", ("in",), settings), {"in": schema}, ())
    assert "'totals'" in caught.value.message
    assert hint in caught.value.hint


def test_inputs_with_other_types_of_a_column_are_refused() -> None:
    inputs = {"a": SCHEMA, "b": pa.schema([("k", pa.int64())])}
    settings = {"keys": ["k"], "aggregates": [{"name": "n", "function": "count"}]}
    with pytest.raises(ConfigError, match="'k' is int64 in input 'b', not string"):
        build_operator(OperatorOptions("totals", "aggregate", ("a", "b"), settings), inputs, ())


class TestConformance(OperatorConformance):
    @pytest.fixture
    def operator(self) -> Any:
        return make(ALL, time="t", before=True)

    @pytest.fixture
    def epochs(self) -> list[Epoch]:
        rng = np.random.default_rng(3)
        rows = [
            {
                "k": ["a", "b", "c", None][rng.integers(0, 4)],
                "g": int(rng.integers(0, 5)),
                "i": int(rng.integers(-9, 9)) if rng.random() < 0.8 else None,
                "d": Decimal(int(rng.integers(-999, 999))).scaleb(-2),
                "f": float(rng.random()),
                "s": ["x", "y", None][rng.integers(0, 3)],
                "t": pa.scalar(int(rng.integers(0, 99)), pa.timestamp("us", "UTC")).as_py(),
                "b": bool(rng.random() < 0.5),
            }
            for _ in range(200)
        ]
        return [{"in": table(rows[at : at + 50])} for at in range(0, 200, 50)]


def test_like_tells_rows_apart() -> None:
    assert_like([{"a": 0.1 + 0.2, "b": 1}], [{"a": 0.3, "b": 1}])
    for other in ([{"a": 0.4, "b": 1}], [{"a": 0.3, "b": 2}], [{"a": 0.3}], []):
        with pytest.raises(AssertionError):
            assert_like([{"a": 0.3, "b": 1}], other)
