"""The decoder of `pgoutput` without a server: what messages say comes out, and damaged bytes raise one error."""

from __future__ import annotations

import contextlib
import random
import struct
from dataclasses import dataclass
from decimal import Decimal
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from firnline.errors import DamagedError
from firnline.sources.cdc.log import Decoded, Op, pack_frame
from firnline.sources.postgres.decode import PostgresDecoder
from firnline.sources.postgres.types import convert, native_type

NAMES = ("id", "note", "amount", "raw")
OIDS = (20, 25, 1700, 17)  # bigint, text, numeric(10,2), bytea
MODIFIERS = (-1, -1, (10 << 16 | 2) + 4, -1)
MISSING = object()  # an unchanged value that the log leaves out

Value = Any
VALUES = st.tuples(
    st.integers(-(2**63), 2**63 - 1),
    st.one_of(st.none(), st.just(MISSING), st.text(st.characters(exclude_characters="\0", codec="utf-8"), max_size=40)),
    st.one_of(st.none(), st.decimals(-(10**6), 10**6, places=2)),
    st.one_of(st.none(), st.just(MISSING), st.binary(max_size=40)),
)
CHANGES = st.tuples(st.sampled_from("IUDT"), st.integers(1, 2), VALUES, st.sampled_from(["", "K", "O"]), VALUES)


@dataclass(frozen=True)
class Expected:
    """A change row that must come out."""

    table: str
    op: Op
    transaction: int
    values: tuple[Value, ...]
    missing: tuple[str, ...]
    before: tuple[Value, ...] | None


def relation(number: int) -> bytes:
    columns = b"".join(
        struct.pack(">B", name == "id") + name.encode() + b"\0" + struct.pack(">Ii", oid, modifier)
        for name, oid, modifier in zip(NAMES, OIDS, MODIFIERS, strict=True)
    )
    return b"R" + struct.pack(">I", number) + f"public\0t{number}\0d".encode() + struct.pack(">H", 4) + columns


def begin(xid: int) -> bytes:
    return b"B" + struct.pack(">QqI", 1000 + xid, 0, xid)


def commit(xid: int) -> bytes:
    return b"C\0" + struct.pack(">QQq", 1000 + xid, 1001 + xid, 0)


def pack(values: tuple[Value, ...]) -> bytes:
    """A tuple as the server writes it."""
    made = struct.pack(">H", len(values))
    for value in values:
        if value is None or value is MISSING:
            made += b"n" if value is None else b"u"
        else:
            text = b"\\x" + value.hex().encode() if isinstance(value, bytes) else str(value).encode()
            made += b"t" + struct.pack(">I", len(text)) + text
    return made


def seen(values: tuple[Value, ...]) -> tuple[Value, ...]:
    return tuple(None if value is MISSING else value for value in values)


def lacking(values: tuple[Value, ...]) -> tuple[str, ...]:
    return tuple(name for name, value in zip(NAMES, values, strict=True) if value is MISSING)


def only_key(values: tuple[Value, ...]) -> tuple[Value, ...]:
    return (values[0], None, None, None)


def unknown(values: tuple[Value, ...]) -> tuple[str, ...]:
    """The columns that an old row does not have: it may be one of a partition that has the key alone."""
    return lacking(tuple(MISSING if value is None else value for value in values))


def write(transactions: list[list[Any]]) -> tuple[bytes, list[Expected]]:
    """Frames of transactions, and the change rows that they hold."""
    messages, expected = [], []
    for index, changes in enumerate(transactions):
        messages += [begin(index), *(relation(number) for number in (1, 2) if index == 0)]
        for kind, number, values, old_kind, old in changes:
            table, head = f"public.t{number}", kind.encode() + struct.pack(">I", number)
            key_kind = old_kind or "K"
            stored = only_key(old) if key_kind == "K" else old
            if kind == "T":
                messages.append(b"T" + struct.pack(">IBI", 1, 0, number))
                expected.append(Expected(table, Op.TRUNCATE, index, (None,) * 4, (), None))
            elif kind == "I":
                messages.append(head + b"N" + pack(values))
                expected.append(Expected(table, Op.INSERT, index, seen(values), lacking(values), None))
            elif kind == "D":
                messages.append(head + key_kind.encode() + pack(stored))
                expected.append(Expected(table, Op.DELETE, index, seen(stored), unknown(stored), seen(stored)))
            else:
                messages.append(head + (old_kind.encode() + pack(stored) if old_kind else b"") + b"N" + pack(values))
                if old_kind == "O":
                    values = tuple(o if v is MISSING and o is not None else v for v, o in zip(values, old, strict=True))
                before = seen(stored) if old_kind else None
                if old_kind == "K" or (old_kind == "O" and values[0] != old[0]):
                    expected.append(Expected(table, Op.DELETE, index, seen(stored), unknown(stored), before))
                    expected.append(Expected(table, Op.INSERT, index, seen(values), lacking(values), before))
                    continue
                expected.append(Expected(table, Op.UPDATE, index, seen(values), lacking(values), before))
        messages.append(commit(index))
    return b"".join(pack_frame(message) for message in messages), expected


def flat(decoded: Decoded) -> list[Expected]:
    """The change rows of all tables in the order of the log."""
    found: dict[int, Expected] = {}
    for changes in decoded.changes:
        rows = changes.rows.to_pylist()
        before = changes.before.to_pylist() if changes.before is not None else [None] * len(rows)
        for row, place in enumerate(changes.order.tolist()):
            missing = tuple(n for n, m in zip(NAMES, changes.missing, strict=True) if m is not None and m[row])
            old = before[row]
            found[place] = Expected(
                changes.schema.table, Op(changes.ops[row]), int(changes.transaction[row]), tuple(rows[row].values()),
                missing, tuple(old.values()) if old is not None else None,
            )  # fmt: skip
    assert sorted(found) == list(range(decoded.count))
    return [found[place] for place in sorted(found)]


@settings(max_examples=200, deadline=None)
@given(st.lists(st.lists(CHANGES, max_size=8), max_size=4))
def test_what_messages_say_comes_out(transactions: list[list[Any]]) -> None:
    """Any changes of two tables, with and without old rows: values, order, what is missing, and the row before."""
    frames, expected = write(transactions)
    assert flat(PostgresDecoder(before=True).decode(b"", frames)) == expected
    alone = flat(PostgresDecoder().decode(b"", frames))
    assert [(one.op, one.values, one.missing) for one in alone] == [(e.op, e.values, e.missing) for e in expected]


def test_values_of_all_lengths_at_the_end_of_the_bytes() -> None:
    """Values are copied sixteen bytes at a time: none loses its end, whatever comes behind it."""
    values = [(n, "x" * n, None, bytes(range(n))) for n in range(70)]
    changes = [("I", 1, row, "", row) for row in values]
    for last in (3, 15, 16, 17, 69):
        frames, expected = write([changes[: last + 1]])
        cut = frames[: -len(pack_frame(commit(0)))]  # the last value ends with the bytes
        assert flat(PostgresDecoder().decode(b"", cut)) == expected


def test_no_values_are_values_of_every_type() -> None:
    """A table without rows has columns of every type."""
    nothing = pa.array([], pa.string())
    for oid in (16, 17, 20, 21, 700, 1082, 1083, 1114, 1184, 2950):
        kind = native_type(oid, -1, {}).arrow
        assert convert(nothing, kind).values.equals(pa.array([], kind))


def test_many_rows_keep_their_order() -> None:
    rng = random.Random(7)
    changes = [
        (
            rng.choice("IUD"),
            rng.randint(1, 2),
            (n, "n", Decimal("1.25"), b"\1"),
            rng.choice(["", "K", "O"]),
            (n, None, None, b""),
        )
        for n in range(5000)
    ]
    frames, expected = write([changes[:4000], changes[4000:]])
    assert flat(PostgresDecoder(before=True).decode(b"", frames)) == expected


def test_damaged_bytes_raise_one_error() -> None:
    """Each byte changed in each bit, and each end: the decoder's own error, or rows; never another, never a crash."""
    row = (5, "some text", Decimal("1.50"), b"\0\xff")
    frames, expected = write(
        [[("I", 1, row, "", row), ("U", 2, row, "O", row), ("U", 1, row, "K", row), ("D", 1, row, "K", row)]]
    )
    refused = 0
    for place in range(len(frames)):
        for bit in range(8):
            damaged = bytearray(frames)
            damaged[place] ^= 1 << bit
            try:
                decoded = PostgresDecoder(before=True).decode(b"", bytes(damaged))
            except DamagedError:
                refused += 1
            else:
                assert all(len(one.ops) == one.rows.num_rows for one in decoded.changes)
    assert refused > len(frames)
    for end in range(len(frames)):
        with contextlib.suppress(DamagedError):
            cut = flat(PostgresDecoder(before=True).decode(b"", frames[:end]))
            assert cut == expected[: len(cut)]


def test_a_tuple_that_does_not_fill_its_frame_is_damage() -> None:
    row = (1, "a", None, None)
    head = pack_frame(begin(0)) + pack_frame(relation(1))
    number = struct.pack(">I", 1)
    for message in (
        b"I" + number + b"N" + pack(row) + b"n",  # more than the tuple
        b"I" + number + b"N" + pack(row)[:-1],  # less
        b"I" + number + b"N" + pack(row[:3]),  # a column less
        b"U" + number + b"O" + pack(row),  # no new tuple
        b"D" + number + b"K" + pack(row) + b"n",
        b"D" + number + b"N" + pack(row),
        b"I" + number + b"N" + pack(row).replace(b"n", b"b", 1),  # a kind that there is not
        b"I" + number,
    ):
        with pytest.raises(DamagedError):
            PostgresDecoder().decode(b"", head + pack_frame(message))
