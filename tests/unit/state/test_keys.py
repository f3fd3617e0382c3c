"""Keys as bytes, to the byte; hashes, slots and shards that never change."""

from __future__ import annotations

import struct
from datetime import UTC, datetime, timedelta
from decimal import Decimal
from typing import Any

import mmh3
import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from firnline.errors import ConfigError
from firnline.state.encoding import hash64, murmur3_32
from firnline.state.keys import (
    LOW48,
    distinct,
    encode_keys,
    key_groups_of,
    locate,
    order_keys,
    shard_of,
    shard_ranges,
    slots,
)

EPOCH = datetime(1970, 1, 1, tzinfo=UTC)


def encoded(values: list[Any], kind: pa.DataType) -> list[bytes]:
    keys = encode_keys(pa.table({"k": pa.array(values, kind)}))
    return [keys[i] for i in range(len(keys))]


def expected(value: Any, kind: str) -> bytes:
    """The specification, once more and slowly."""
    if value is None:
        return b"\0"
    if kind == "int":
        return b"\x0a" + struct.pack("<Q", value) if value >= 2**63 else b"\x01" + struct.pack("<q", value)
    if kind == "bool":
        return b"\x02" + bytes([value])
    if kind == "float":
        if value != value:
            return b"\x03" + bytes.fromhex("000000000000f87f")
        return b"\x03" + struct.pack("<d", value + 0.0)
    if kind in ("text", "bytes"):
        data = bytes(value.encode() if kind == "text" else value)
        return (b"\x04" if kind == "text" else b"\x05") + struct.pack("<I", len(data)) + data
    if kind == "date":
        return b"\x06" + struct.pack("<q", (value - EPOCH.date()).days)
    if kind == "time":
        return b"\x07" + struct.pack("<q", (value - EPOCH) // timedelta(microseconds=1))
    assert kind == "decimal"
    sign, digits, exponent = value.as_tuple()
    number, scale = int("".join(map(str, digits))) * (-1 if sign else 1), -int(exponent)
    while number and number % 10 == 0:
        number, scale = number // 10, scale - 1
    scale = scale if number else 0
    return b"\x08" + number.to_bytes(16, "little", signed=True) + struct.pack("<h", scale)


SMALL = st.integers(-(2**31), 2**31 - 1)
KINDS: dict[str, tuple[str, list[pa.DataType], st.SearchStrategy[Any]]] = {
    "int32": ("int", [pa.int32(), pa.int64()], SMALL),
    "int64": ("int", [pa.int64()], st.integers(-(2**63), 2**63 - 1)),
    "uint64": ("int", [pa.uint64()], st.integers(0, 2**64 - 1)),
    "bool": ("bool", [pa.bool_()], st.booleans()),
    "float": ("float", [pa.float64()], st.floats()),
    "float32": ("float", [pa.float32(), pa.float64()], st.floats(width=32)),
    "text": ("text", [pa.string(), pa.large_string(), pa.string_view()], st.text(max_size=30)),
    "bytes": ("bytes", [pa.binary(), pa.large_binary()], st.binary(max_size=30)),
    "date": ("date", [pa.date32(), pa.date64()], st.dates()),
    "time": (
        "time",
        [pa.timestamp("us"), pa.timestamp("us", "UTC"), pa.timestamp("us", "Asia/Tokyo")],
        st.datetimes(timezones=st.just(UTC)),
    ),
    "decimal": (
        "decimal",
        [pa.decimal128(38, 10)],
        st.decimals(-(10**27), 10**27, places=10).filter(lambda d: len(d.as_tuple().digits) <= 38),
    ),
}


@settings(max_examples=150)
@given(st.data())
def test_columns_of_every_type_are_encoded_as_specified(data: st.DataObject) -> None:
    """Nulls, slices, chunks and dictionaries make no difference."""
    rows = data.draw(st.integers(0, 8))
    columns, told = {}, [b""] * rows
    for number, name in enumerate(data.draw(st.lists(st.sampled_from(sorted(KINDS)), max_size=3))):
        kind, types, values = KINDS[name]
        drawn = data.draw(st.lists(st.none() | values, min_size=rows, max_size=rows))
        plain = pa.array([drawn[0] if drawn else None, *drawn], data.draw(st.sampled_from(types))).slice(1)
        shape = data.draw(st.sampled_from(["plain", "chunks", "dictionary"]))
        if shape == "chunks":
            cut = data.draw(st.integers(0, rows))
            column = pa.chunked_array([plain.slice(0, cut), plain.slice(cut)], plain.type)
        elif shape == "dictionary" and plain.type in (pa.int64(), pa.string()):
            column = pa.chunked_array([plain.dictionary_encode()])
        else:
            column = pa.chunked_array([plain])
        columns[str(number)] = column
        told = [a + expected(v, kind) for a, v in zip(told, drawn, strict=True)]
    keys = encode_keys(pa.table(columns), rows)
    assert [keys[i] for i in range(len(keys))] == told
    picked = np.array(data.draw(st.lists(st.integers(0, rows - 1), max_size=5) if rows else st.just([])), np.int64)
    taken = keys.take(picked)
    assert [taken[i] for i in range(len(taken))] == [told[i] for i in picked]


def test_widths_and_units_of_one_value_are_one_key() -> None:
    integers = [pa.int8(), pa.int16(), pa.int32(), pa.int64(), pa.uint8(), pa.uint16(), pa.uint32(), pa.uint64()]
    assert len({encoded([7], kind)[0] for kind in integers}) == 1
    moment = datetime(2026, 3, 4, 5, 6, 7, tzinfo=UTC)
    assert len({encoded([moment], pa.timestamp(unit, "UTC"))[0] for unit in ("s", "ms", "us", "ns")}) == 1
    assert encoded([0.0, -0.0], pa.float64())[0] == encoded([-0.0], pa.float32())[0]
    numbers = [("1.50", 2), ("1.5", 1), ("1.5000", 4)]
    assert len({encoded([Decimal(text)], pa.decimal128(20, scale))[0] for text, scale in numbers}) == 1
    assert encoded([b"abc"], pa.binary(3)) == encoded([b"abc"], pa.binary())
    assert encoded([None], pa.null()) == encoded([None], pa.string()) == [b"\0"]
    small = pa.array([Decimal("2.50")], pa.decimal128(5, 2)).cast(pa.decimal64(5, 2))
    assert encode_keys(pa.table({"k": small}))[0] == encoded([Decimal("2.5")], pa.decimal128(5, 1))[0]


def test_decimals_of_every_size_lose_only_their_trailing_zeros() -> None:
    values = [Decimal(sign * digit * 10**power) for sign in (1, -1) for digit in (1, 7, 99) for power in range(36)]
    values += [Decimal(2**64), Decimal(-(2**64)), Decimal(10**38 - 1), Decimal(-(10**38) + 1), Decimal(0)]
    assert encoded(values, pa.decimal128(38, 0)) == [expected(value, "decimal") for value in values]


def test_every_not_a_number_is_one_key() -> None:
    bits = np.array([0x7FF8000000000000, 0xFFF8000000000001, 0x7FF0000000000001], np.uint64)
    keys = encode_keys(pa.table({"k": bits.view(np.float64)}))
    assert {keys[i] for i in range(3)} == {b"\x03" + bytes.fromhex("000000000000f87f")}


@pytest.mark.parametrize(
    "kind", [pa.list_(pa.int64()), pa.struct([("a", pa.int64())]), pa.decimal256(50, 2), pa.time64("us")]
)
def test_other_types_are_refused_by_name(kind: pa.DataType) -> None:
    with pytest.raises(ConfigError, match="'odd'"):
        encode_keys(pa.table({"k": [1], "odd": pa.nulls(1, kind)}))


def test_times_finer_than_a_microsecond_are_refused() -> None:
    with pytest.raises(ConfigError, match="'at'"):
        encode_keys(pa.table({"at": pa.array([1], pa.timestamp("ns"))}))


def test_columns_do_not_run_into_each_other() -> None:
    rows = [("ab", "c"), ("a", "bc"), ("abc", ""), ("", "abc"), (None, "abc"), ("abc", None)]
    table = pa.table({"a": [a for a, _ in rows], "b": [b for _, b in rows]})
    keys = encode_keys(table)
    assert len({keys[i] for i in range(len(rows))}) == len(rows)


# -- hashes ----------------------------------------------------------------------------------------------

FIXED = {  # part of the format: they must never change
    b"": (0x00000000, 0x0000000000000000),
    b"a": (0x3C2569B2, 0x85555565F6597889),
    b"hello": (0x248BFA47, 0xCBD8A7B341BD9B02),
    b"The quick brown fox jumps over the lazy dog": (0x2E4FF723, 0xE34BBC7BBC071B6C),
}


def hashes(strings: list[bytes]) -> list[tuple[int, int]]:
    data = np.frombuffer(b"".join(strings), np.uint8).copy()
    offsets = np.cumsum([0, *map(len, strings)], dtype=np.int64)
    return [(int(a), int(b)) for a, b in zip(murmur3_32(data, offsets), hash64(data, offsets), strict=True)]


def by_mmh3(string: bytes) -> tuple[int, int]:
    return mmh3.hash(string, 0, signed=False), mmh3.hash64(string, 0, x64arch=True, signed=False)[0]


def test_fixed_strings_have_their_fixed_hashes() -> None:
    assert dict(zip(FIXED, hashes(list(FIXED)), strict=True)) == FIXED


def test_strings_of_every_length_hash_as_the_reference_does() -> None:
    strings = [bytes((i * 37 + k) % 256 for k in range(i)) for i in range(70)]
    strings += [b"\xff" * i for i in range(40)] + [b"\0" * i for i in range(40)]
    assert hashes(strings) == [by_mmh3(s) for s in strings]


@given(st.lists(st.binary(max_size=100), max_size=10))
def test_random_strings_hash_as_the_reference_does(strings: list[bytes]) -> None:
    assert hashes(strings) == [by_mmh3(s) for s in strings]


# -- groups, slots, shards -------------------------------------------------------------------------------


def test_a_slot_is_the_group_above_the_hash_of_the_whole_key() -> None:
    table = pa.table({"user": ["ann", "ann", "bob"], "start": [1, 2, 1]})
    found = locate(table, 1, 128)
    users, whole = encode_keys(table.select(["user"])), encode_keys(table)
    for row in range(3):
        group = mmh3.hash(users[row], 0, signed=False) % 128
        low = mmh3.hash64(whole[row], 0, x64arch=True, signed=False)[0] & LOW48
        assert (int(found.groups[row]), int(found.slots[row])) == (group, group << 48 | low)
    assert found.groups[0] == found.groups[1]
    assert found.slots[0] != found.slots[1]


def test_without_key_columns_there_is_one_key() -> None:
    found = locate(pa.table({}), 0, 128, rows=3)
    assert [found.keys[i] for i in range(3)] == [b""] * 3
    assert found.slots.tolist() == [0, 0, 0]


def test_the_largest_group_and_hash_fit_a_slot() -> None:
    assert slots(np.array([65535], np.uint16), np.array([2**64 - 1], np.uint64)).tolist() == [2**64 - 1]
    keys = encode_keys(pa.table({"k": [f"{i}" for i in range(1000)]}))
    assert key_groups_of(keys, 65536).max() > 60_000


@pytest.mark.parametrize("groups", [0, 65537])
def test_a_number_of_groups_that_does_not_fit_is_refused(groups: int) -> None:
    with pytest.raises(ConfigError):
        key_groups_of(encode_keys(pa.table({"k": [1]})), groups)


@given(st.integers(1, 300).flatmap(lambda n: st.tuples(st.just(n), st.integers(1, n))))
def test_shards_are_contiguous_even_and_complete(sizes: tuple[int, int]) -> None:
    key_groups, shards = sizes
    ranges = shard_ranges(key_groups, shards)
    assert [g for first, last in ranges for g in range(first, last)] == list(range(key_groups))
    assert max(b - a for a, b in ranges) - min(b - a for a, b in ranges) <= 1
    owners = shard_of(np.arange(key_groups, dtype=np.uint16), ranges)
    assert all(ranges[s][0] <= g < ranges[s][1] for g, s in enumerate(owners))


@pytest.mark.parametrize("shards", [0, 129])
def test_more_shards_than_groups_are_refused(shards: int) -> None:
    with pytest.raises(ConfigError, match="128"):
        shard_ranges(128, shards)


# -- order -----------------------------------------------------------------------------------------------


@given(
    st.lists(st.sampled_from(["a", "b", "c", "ab", "", "abc", None]), max_size=25), st.sampled_from([0, 1, 3, LOW48])
)
def test_distinct_keys_are_told_apart_by_bytes_whatever_slots_they_share(names: list[str | None], mask: int) -> None:
    table = pa.table({"k": pa.array(names, pa.string())})
    found = locate(table, 1, 2, mask=mask)
    each = distinct(found.slots, found.keys)
    firsts = {name: names.index(name) for name in names}
    assert sorted(each.rows.tolist()) == sorted(firsts.values())
    assert [int(each.rows[k]) for k in each.key_of] == [firsts[name] for name in names]
    ranked = [(int(found.slots[row]), found.keys[row]) for row in each.rows]
    assert ranked == sorted(ranked)
    order, first = order_keys(found.slots, found.keys)
    assert order.tolist() == sorted(range(len(names)), key=lambda i: (int(found.slots[i]), found.keys[i], i))
    assert int(first.sum()) == len(firsts)
