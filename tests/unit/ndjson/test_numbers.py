"""Numbers, times, decimals and base64 from text: exact, against Python's own."""

from __future__ import annotations

import base64
import struct
from datetime import UTC, date, datetime, timedelta, timezone
from decimal import Decimal
from typing import Any

import numpy as np
import pytest

from firnline.ndjson import Block, Decoded, DecodeOptions, Decoder, exact
from firnline.schema import schema_from_spec


def _column(kind: str, texts: list[str]) -> tuple[Decoded, int]:
    """Decode one value per record into a frozen column; also tell how many took the exact path."""
    schema = schema_from_spec([{"name": "x", "type": kind}])
    decoder = Decoder(schema, ["x"], DecodeOptions(evolution="rescue"))
    data = "".join(f'{{"x":{text}}}\n' for text in texts).encode()
    odd: list[Any] = []
    with pytest.MonkeyPatch.context() as patch:
        parse = exact.parse
        patch.setattr(exact, "parse", lambda raw: odd.append(raw) or parse(raw))  # type: ignore[func-returns-value]
        decoded = decoder.decode(Block(data, 0, 1, len(texts), len(texts), len(data), len(data)))
    return decoded, len(odd)


def _values(kind: str, texts: list[str]) -> list[Any]:
    decoded, _ = _column(kind, texts)
    values: list[Any] = decoded.batch.column("x").to_pylist()
    return values


def _bits(number: float) -> bytes:
    return struct.pack("<d", number)


def test_doubles_are_the_nearest_ones() -> None:
    rng = np.random.default_rng(1)
    raw = rng.integers(0, 1 << 64, 60_000, np.uint64).view(np.float64)
    texts = [repr(x) for x in raw[np.isfinite(raw)].tolist()]
    texts += [repr(x) for x in (rng.random(20_000) * 360 - 180).tolist()]
    texts += [f"{x:.{d}f}" for x, d in zip((rng.random(5_000) * 1e6).tolist(), rng.integers(1, 12, 5_000), strict=True)]
    digits = rng.integers(1, 20, 20_000)
    texts += [
        f"{rng.integers(1, 10 ** min(d, 18))}.{rng.integers(1, 1000)}e{e}"
        for d, e in zip(digits.tolist(), rng.integers(-330, 300, 20_000).tolist(), strict=True)
    ]
    # Half-way between two doubles, where rounding must go to even.
    texts += [f"{(2**53 + 2 * n + 1) * 2**k}.0" for n in range(50) for k in range(10)]
    texts += [
        "0.0",
        "-0.0",
        "0e5",
        "-0",
        "1E5",
        "1e+5",
        "0.000001e-300",
        "9007199254740993.0",
        "5e-324",
        "1.7976931348623157e308",
    ]
    decoded, odd = _column("float64", texts)
    for text, found in zip(texts, decoded.batch.column("x").to_pylist(), strict=True):
        expected = float(text)
        if expected in (float("inf"), float("-inf")) or (expected == 0 and text.split("e")[0].strip("-0.")):
            assert found is None, text
        else:
            assert _bits(found) == _bits(expected), text
    assert odd < len(texts) / 10


def test_integers_fit_doubles_only_when_exact() -> None:
    texts = [
        "3",
        "-0",
        str(2**53),
        str(2**53 + 1),
        str(2**53 + 2),
        str(2**63),
        str(2**63 + 1),
        str(2**64),
        "1" + "0" * 22,
        "1" + "0" * 23,
        "9" * 400,
        "9" * 5000,
    ]
    expected = [3.0, -0.0, 2.0**53, None, 2.0**53 + 2, 2.0**63, None, 2.0**64, 1e22, None, None, None]
    assert repr(_values("float64", texts)) == repr(expected)


def test_integers_fit_by_range_and_spelling() -> None:
    texts = [
        "0",
        "-0",
        "7",
        str(2**63 - 1),
        str(-(2**63)),
        str(2**63),
        str(-(2**63) - 1),
        "1.0",
        "1e3",
        "1.5",
        "1e400",
        '"1"',
        "true",
        "1" * 5000,
    ]
    expected = [0, 0, 7, 2**63 - 1, -(2**63), *[None] * 9]
    assert _values("int64", texts) == expected
    texts = [str(2**31 - 1), str(-(2**31)), str(2**31), str(-(2**31) - 1), str(2**40)]
    assert _values("int32", texts) == [2**31 - 1, -(2**31), None, None, None]


def test_float32_rounds_fractions_and_refuses_what_it_cannot_hold() -> None:
    texts = ["1.1", "3", str(2**24), str(2**24 + 1), "1e38", "1e39", "3.4028235e38", "1e-40", "1e-46", "0.0"]
    f = np.float32
    with np.errstate(under="ignore"):
        expected = [
            float(f(1.1)),
            3.0,
            2.0**24,
            None,
            float(f(1e38)),
            None,
            float(f(3.4028235e38)),
            float(f(1e-40)),
            None,
            0.0,
        ]
    assert _values("float32", texts) == expected


def test_decimals_need_no_rounding() -> None:
    texts = [
        "1.5",
        "-1.50",
        "1.500",
        "1.555",
        "12345678.99",
        "123456789.99",
        "1e2",
        "1.2e-1",
        "0",
        "-0.0",
        '"7.10"',
        '"07"',
        '" 7"',
        '"x"',
        "1e999999999999999999999",
        "0e99999",
    ]
    expected = [
        "1.50",
        "-1.50",
        "1.50",
        None,
        "12345678.99",
        None,
        "100.00",
        "0.12",
        "0.00",
        "0.00",
        "7.10",
        None,
        None,
        None,
        None,
        "0.00",
    ]
    assert _values("decimal(10,2)", texts) == [None if text is None else Decimal(text) for text in expected]
    long = "-12345678901234567890123456789012345.678"
    assert _values("decimal(38,3)", [long, "1" + long[1:], "5"]) == [Decimal(long), None, Decimal("5.000")]
    rng = np.random.default_rng(2)
    texts = [
        f"{a}.{b:04}" for a, b in zip(rng.integers(-(10**9), 10**9, 3000), rng.integers(0, 10**4, 3000), strict=True)
    ]
    decoded, odd = _column("decimal(18,4)", texts)
    assert decoded.batch.column("x").to_pylist() == [Decimal(text) for text in texts]
    assert odd == 0


def test_times_are_read_as_utc() -> None:
    rng = np.random.default_rng(3)
    zones = [timezone(timedelta(minutes=int(m))) for m in rng.integers(-1439, 1440, 50)]
    texts, expected = [], []
    for number in range(4000):
        moment = datetime(1, 1, 3, tzinfo=UTC) + timedelta(
            days=int(rng.integers(0, 3652000)), microseconds=int(rng.integers(0, 86_400_000_000))
        )
        local = moment.astimezone(zones[number % 50])
        texts.append(f'"{local.isoformat(timespec="microseconds")}"')
        expected.append(moment)
    decoded, odd = _column("timestamp", texts)
    micros = decoded.batch.column("x").cast("int64").to_pylist()
    epoch = datetime(1970, 1, 1, tzinfo=UTC)
    assert micros == [(moment - epoch) // timedelta(microseconds=1) for moment in expected]
    assert odd == 0


def test_what_is_a_time_and_what_is_not() -> None:
    good = {
        "2024-02-29T23:59:59Z": (2024, 2, 29, 23, 59, 59, 0),
        "2024-02-29t23:59:59z": (2024, 2, 29, 23, 59, 59, 0),
        "2024-02-29 23:59:59.5": (2024, 2, 29, 23, 59, 59, 500_000),
        "2024-02-29T23:59:59.123456000Z": (2024, 2, 29, 23, 59, 59, 123_456),
        "2024-02-29": (2024, 2, 29, 0, 0, 0, 0),
        "2024-01-01T00:30:00+01:00": (2023, 12, 31, 23, 30, 0, 0),
        "2024-01-01T00:00:00-00:00": (2024, 1, 1, 0, 0, 0, 0),
    }
    expected = [datetime(*parts, tzinfo=UTC) for parts in good.values()]
    assert _values("timestamp", [f'"{text}"' for text in good]) == expected
    bad = [
        '"2023-02-29"',
        '"2024-00-10"',
        '"2024-13-01"',
        '"2024-04-31T00:00:00Z"',
        '"0000-01-01"',
        '"2024-1-1"',
        '"24-01-01"',
        '"2024-01-01T24:00:00Z"',
        '"2024-01-01T00:60:00Z"',
        '"2024-01-01T00:00:60Z"',
        '"2024-01-01T00:00Z"',
        '"2024-01-01T"',
        '"2024-01-01T00:00:00.Z"',
        '"2024-01-01T00:00:00.1234567Z"',
        '"2024-01-01T00:00:00+0100"',
        '"2024-01-01T00:00:00+24:00"',
        '"2024-01-01T00:00:00+01:60"',
        '"2024-01-01T00:00:00Z "',
        '" 2024-01-01"',
        '""',
        "1700000000",
        "true",
        '"\\uff12024-01-01"',
    ]
    assert _values("timestamp", bad) == [None] * len(bad)


def test_dates() -> None:
    good = [
        date(1, 1, 1),
        date(1969, 12, 31),
        date(1970, 1, 1),
        date(2000, 2, 29),
        date(2024, 12, 31),
        date(9999, 12, 31),
    ]
    assert _values("date", [f'"{day}"' for day in good]) == good
    every = [date(1899, 12, 1) + timedelta(days=n) for n in range(80_000)]
    decoded, odd = _column("date", [f'"{day}"' for day in every])
    assert decoded.batch.column("x").to_pylist() == every
    assert odd == 0
    bad = [
        '"1900-02-29"',
        '"2100-02-29"',
        '"0000-01-01"',
        '"2024-01-01T00:00:00Z"',
        '"2024-01-1"',
        "20240101",
        '"2024-01-01 "',
    ]
    assert _values("date", bad) == [None] * len(bad)


def test_base64_is_canonical() -> None:
    rng = np.random.default_rng(4)
    blobs = [rng.bytes(n) for n in range(200)]
    decoded, odd = _column("binary", [f'"{base64.b64encode(blob).decode()}"' for blob in blobs])
    assert decoded.batch.column("x").to_pylist() == blobs
    assert odd == 0
    assert _values("binary", ['"a\\/8="']) == [b"k\xff"]
    bad = ['"aGk"', '"aGk=="', '"aGl="', '"aG k="', '"a==="', '"===="', '"aGk=aGk="', '"aG=k"', '"aG-_"', '"é"', "5"]
    assert _values("binary", bad) == [None] * len(bad)


def test_booleans_are_no_numbers_and_numbers_no_booleans() -> None:
    assert _values("boolean", ["true", "false", "null", "0", "1", '"true"']) == [True, False, None, None, None, None]


@pytest.mark.parametrize(
    "text",
    [
        "01",
        "-",
        "1.",
        ".5",
        "+1",
        "1e",
        "1e+",
        "0x1",
        "NaN",
        "Infinity",
        "-Infinity",
        "1_0",
        "tru",
        "nul",
        "True",
        "--1",
        "-01",
        "1.e5",
    ],
)
@pytest.mark.parametrize("kind", ["int64", "float64", "decimal(10,2)", "json", "string", "boolean"])
def test_what_is_no_json_is_a_bad_record(text: str, kind: str) -> None:
    decoded, _ = _column(kind, ["null", text, "null"])
    assert [(bad.record, bad.reason) for bad in decoded.bad] == [(1, "not-json")]
    assert decoded.record_numbers.to_pylist() == [0, 2]
