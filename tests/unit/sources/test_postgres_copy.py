"""COPY's text, decoded by compiled code: as a plain parser reads it, or an error; never another row."""

from __future__ import annotations

import random

import pytest

from firnline.errors import DamagedError
from firnline.sources.cdc.log import pack_frame
from firnline.sources.postgres import messages as m
from firnline.sources.postgres.decode import PostgresDecoder

TEXT = 25
ESCAPES = {"\\": "\\\\", "\n": "\\n", "\t": "\\t", "\r": "\\r", "\b": "\\b", "\f": "\\f", "\v": "\\v"}
PLAIN = {escape[1]: sign for sign, escape in ESCAPES.items()}
SIGNS = ["\\", "\n", "\t", "\r", "\b", "\f", "\v", "a", "ä", "N", "\\N", "'", "a longer piece of text ", ""]


def context(columns: int) -> bytes:
    described = tuple(m.RelationColumn(f"c{number}", TEXT, -1, number == 0) for number in range(columns))
    return pack_frame(m.Relation(1, "public", "t", "d", described).pack())


def write(rows: list[list[str | None]]) -> bytes:
    lines = ["\t".join("\\N" if v is None else "".join(ESCAPES.get(s, s) for s in v) for v in row) for row in rows]
    return "".join(f"{line}\n" for line in lines).encode()


def parse(content: bytes, columns: int) -> list[list[str | None]] | None:
    """Read COPY's text sign by sign; None if it is damaged."""
    try:
        text = content.decode()
    except UnicodeDecodeError:
        return None
    if text and not text.endswith("\n"):
        return None
    rows = []
    for line in text.split("\n")[:-1]:
        values: list[str | None] = []
        for value in line.split("\t"):
            if value == "\\N":
                values.append(None)
                continue
            signs, found = iter(value), []
            for sign in signs:
                plain = sign if sign != "\\" else PLAIN.get(next(signs, ""))
                if plain is None:
                    return None
                found.append(plain)
            values.append("".join(found))
        if len(values) != columns:
            return None
        rows.append(values)
    return rows


def decode(content: bytes, columns: int) -> list[list[str | None]]:
    rows = PostgresDecoder().decode_chunk(context(columns), content).rows
    return [list(row.values()) for row in rows.to_pylist()]


def make_rows(seed: int, columns: int, count: int) -> list[list[str | None]]:
    chance = random.Random(seed)
    return [
        [
            None if chance.random() < 0.2 else "".join(chance.choices(SIGNS, k=chance.randrange(6)))
            for _ in range(columns)
        ]
        for _ in range(count)
    ]


@pytest.mark.parametrize("seed", range(20))
def test_every_value_comes_as_it_was_written(seed: int) -> None:
    columns = 1 + seed % 4
    rows = make_rows(seed, columns, 200)
    assert parse(write(rows), columns) == rows
    assert decode(write(rows), columns) == rows


def test_damaged_text_is_an_error_or_what_the_text_says() -> None:
    columns = 3
    content = write(make_rows(7, columns, 30))
    refused = 0
    for at in range(len(content)):
        for byte in (content[at] ^ 1, content[at] ^ 0x80, ord("\\"), ord("\t"), ord("\n"), ord("N")):
            damaged = content[:at] + bytes([byte]) + content[at + 1 :]
            expected = parse(damaged, columns)
            if expected is not None:
                assert decode(damaged, columns) == expected
                continue
            with pytest.raises(DamagedError):
                decode(damaged, columns)
            refused += 1
    assert refused > len(content)


def test_text_that_is_cut_off() -> None:
    columns = 3
    content = write(make_rows(8, columns, 10))
    for end in range(1, len(content)):
        expected = parse(content[:end], columns)
        if expected is not None:
            assert decode(content[:end], columns) == expected
            continue
        with pytest.raises(DamagedError):
            decode(content[:end], columns)
