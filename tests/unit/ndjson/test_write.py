"""Doubles become the shortest text that reads back the same, as Python writes them."""

from __future__ import annotations

import random
import struct
from decimal import Decimal

import pyarrow as pa

from firnline.ndjson import write

EDGES = [
    *(2.0**n for n in range(-1074, 1024)),
    *(float(f"1e{n}") for n in range(-323, 309)),
    *(float(f"9.999999999999999e{n}") for n in range(-323, 308)),
    5e-324, 2.2250738585072014e-308, 2.225073858507201e-308, 1.7976931348623157e308, 0.1, 0.3, 1 / 3, 2**53 + 2.0,
]  # fmt: skip


def written(values: list[float]) -> list[str]:
    column = write.as_column(pa.array(values, pa.float64()), pa.field("a", pa.float64()))
    assert column is not None
    return [text.decode() for text in write.write_values(column, len(values)).to_pylist()]


def test_doubles_have_the_digits_of_python() -> None:
    write.warm_up()
    rng = random.Random(7)
    values = [*EDGES, *(-value for value in EDGES), 0.0, -0.0]
    for _ in range(20_000):
        (value,) = struct.unpack("d", rng.randbytes(8))
        values += [value, rng.uniform(-1e6, 1e6), round(rng.uniform(-1e4, 1e4), 2), float(rng.getrandbits(60))]
    values = [value for value in values if abs(value) < float("inf")]
    for value, text in zip(values, written(values), strict=True):
        assert Decimal(text).normalize() == Decimal(repr(value)).normalize(), value
        assert float(text) == value
        assert ("e" in text) == (value != 0 and not 1e-6 <= abs(value) < 1e21), text
        assert "e" in text or "." in text
