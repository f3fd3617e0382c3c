"""Strings that are time stamps become timestamp columns: what counts as one, and how a new column gets its type."""

from __future__ import annotations

import io
import itertools
import json
from datetime import UTC, datetime
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from firnline.ndjson import DecodeOptions, Decoder, KindCounter, choose, exact, open_blocks
from firnline.ndjson import kernel as k
from firnline.ndjson.numbers import scan_timestamp

PLAIN = settings(deadline=None, derandomize=True, max_examples=400, suppress_health_check=list(HealthCheck))
TIMESTAMP = pa.timestamp("us", "UTC")
STAMP = "2024-05-01T12:30:00Z"

_parts = (
    st.sampled_from(["2024-02-29", "2023-02-29", "0001-01-01", "9999-12-31", "0000-01-01", "2024-13-01", "24-01-01"]),
    st.sampled_from(["T", "t", " ", "", "  ", "X"]),
    st.sampled_from(["00:00:00", "23:59:59", "24:00:00", "12:60:00", "12:00:60", "12:30", "1:00:00"]),
    st.just("") | st.text("0123456789", max_size=11).map(lambda digits: f".{digits}") | st.just(".123456000"),
    st.sampled_from(["", "Z", "z", "+02:00", "-23:59", "+24:00", "+01:60", "+0100", "Z ", '"']),
)
_stamps = st.tuples(*_parts).map("".join)


@PLAIN
@given(_stamps | st.text(max_size=36))
def test_the_compiled_path_and_the_exact_path_agree_on_time_stamps(text: str) -> None:
    schema = pa.schema([("x", TIMESTAMP)])
    line = json.dumps({"x": text}, ensure_ascii=False).encode("utf-8", "surrogatepass")
    raw = np.frombuffer(text.encode("utf-8", "surrogatepass") + b'"' + bytes(40), np.uint8)
    end, micros = scan_timestamp.py_func(raw, 0)
    fits = end == len(text.encode("utf-8", "surrogatepass"))
    assert exact.is_timestamp(text) == (fits and len(text) != 10)
    array = pa.array([None, text, "other"]) if text.isprintable() else pa.array([text.encode("utf-8", "replace")])
    if array.type == pa.string():
        counter = KindCounter(pa.schema([]), (), ())
        counter.add(pa.record_batch([array.slice(1, 1)], names=["x"]))
        assert counter.to_json() == {"x": {"timestamp" if exact.is_timestamp(text) else "string": 1}}
    if fits:
        decoder = Decoder(schema, ["x"])
        (block,) = open_blocks(io.BytesIO(line + b"\n"), path="", compression=None)
        assert decoder.decode(block).batch.column("x").cast("int64").to_pylist() == [micros]
        if len(text) != 10:
            assert exact.fit(text, decoder._root.children[0]) == micros


@pytest.mark.parametrize(
    ("text", "is_one"),
    [
        (STAMP, True),
        ("2024-05-01 12:30:00", True),
        ("2024-05-01T12:30:00.123456000+02:00", True),
        ("2024-05-01T12:30:00.123456789Z", False),  # nanoseconds would be lost
        ("2024-05-01", False),
        ("2024-05-01T12:30Z", False),
        ("0001-01-01T00:00:00+01:00", False),  # the year 0 in UTC
        ("9999-12-31T23:59:59-01:00", False),
        ("1714566600", False),
    ],
)
def test_what_is_a_time_stamp(text: str, is_one: bool) -> None:
    assert exact.is_timestamp(text) == is_one
    assert infer([{"x": text}]) == ("timestamp" if is_one else "string", 0)


def decode(records: list[dict[str, Any]], **options: Any) -> tuple[Decoder, list[pa.RecordBatch]]:
    decoder = Decoder(pa.schema([]), (), DecodeOptions(**options))
    data = "".join(json.dumps(record) + "\n" for record in records).encode()
    return decoder, [decoder.decode(block).batch for block in open_blocks(io.BytesIO(data), path="", compression=None)]


def infer(records: list[dict[str, Any]], timestamps: bool = True) -> tuple[str | None, int]:
    """Return the kind of the column `x`, and how many values do not fit."""
    counter = KindCounter(pa.schema([]), (), (), timestamps)
    for batch in decode(records, infer_timestamps=timestamps)[1]:
        counter.add(batch)
    choice = choose("x", counter.counts["x"])
    return choice.kind, choice.odd


def test_nineteen_of_twenty_values_must_be_time_stamps() -> None:
    assert infer([{"x": STAMP}] * 19 + [{"x": "soon"}]) == ("timestamp", 1)
    assert infer([{"x": STAMP}] * 18 + [{"x": "soon"}] * 2) == ("string", 0)
    assert infer([{"x": STAMP}] * 19 + [{"x": 7}]) == ("timestamp", 1)
    assert infer([{"x": STAMP}] * 19 + [{"x": "2024-05-01"}]) == ("timestamp", 1)
    assert infer([{"x": STAMP}] * 20, timestamps=False) == ("string", 0)


@pytest.mark.parametrize("values", list(itertools.permutations([STAMP, "2024-05-01", "soon", 7, None])))
def test_the_order_of_records_does_not_decide_the_counts(values: tuple[Any, ...]) -> None:
    counter = KindCounter(pa.schema([]), (), ())
    for batch in decode([{"x": value} for value in values])[1]:
        counter.add(batch)
    assert counter.to_json() == {"x": {"timestamp": 1, "string": 2, "int64": 1}}


def test_a_chosen_timestamp_column_rescues_other_strings_and_counts_them() -> None:
    records = [{"x": STAMP}, {"x": "soon"}, {"x": "2024-05-01T12:30:00.123456789Z"}, {"x": "2024-05-01"}]
    decoder = Decoder(pa.schema([]), (), DecodeOptions(kinds={"x": "timestamp"}))
    data = "".join(json.dumps(record) + "\n" for record in records).encode()
    (block,) = open_blocks(io.BytesIO(data), path="", compression=None)
    decoded = decoder.decode(block)
    assert decoded.batch.column("x").to_pylist() == [
        datetime(2024, 5, 1, 12, 30, tzinfo=UTC),
        None,
        None,
        datetime(2024, 5, 1, tzinfo=UTC),
    ]
    assert decoded.batch.column("_rescued_data").drop_null().to_pylist() == [
        '{"x":"soon"}',
        '{"x":"2024-05-01T12:30:00.123456789Z"}',
    ]
    assert [(one.column, one.values, one.expected) for one in decoded.rescued] == [("x", 2, "timestamp")]


def test_nested_time_stamps_are_inferred_too() -> None:
    decoder, _ = decode([{"a": {"at": STAMP}, "l": [STAMP], "s": [{"at": STAMP}]}])
    assert decoder.schema == pa.schema(
        [
            ("a", pa.struct([("at", TIMESTAMP)])),
            ("l", pa.list_(TIMESTAMP)),
            ("s", pa.list_(pa.struct([("at", TIMESTAMP)]))),
        ]
    )


def test_counting_takes_slices_and_nulls() -> None:
    array = pa.array(["soon", None, STAMP, "", STAMP, "x" * 100])
    counter = KindCounter(pa.schema([]), (), ())
    counter.add(pa.record_batch([array.slice(1, 4)], names=["x"]))
    assert counter.to_json() == {"x": {"timestamp": 2, "string": 1}}


def test_the_longest_time_stamp_is_counted() -> None:
    longest = "2024-05-01T12:30:00.123456000+02:00"
    assert len(longest) == k.MAX_TIMESTAMP
    assert infer([{"x": longest}]) == ("timestamp", 0)
