"""Chunks of PostgreSQL tables by keys of many types: every row once, in the order of the key."""

from __future__ import annotations

import pytest

from firnline.sources.cdc.tables import TablePatterns
from firnline.sources.postgres.decode import PostgresDecoder
from firnline.sources.postgres.server import PostgresServer
from firnline.sources.postgres.tables import PostgresTables
from tests.support.captured import execute

KEYS = {
    "int, int": "g % 7, g",
    "char(10)": "'a' || lpad(g::text, 5, '0')",
    "bit(16)": "(g + 32768)::bit(16)",
    "varchar(20)": "'v' || g",
    "text": r"E'a\t\\ \n''%%s' || g",
    "float8": "CASE WHEN g = 350 THEN 'NaN' ELSE 1.0 / g END",
    "numeric": "g / 7.0",
    "numeric(10, 3)": "g / 8.0",
    "uuid": "md5(g::text)::uuid",
    "interval": "g * interval '1 month 3 hours'",
    "timestamptz": "timestamptz '2024-01-01' + g * interval '7 microseconds'",
    "bytea": r"decode(md5(g::text), 'hex')",
    "colour": "(ARRAY['red', 'green'])[1 + g % 2]::colour, g",
    "code": "'a' || g",
}


@pytest.mark.parametrize("kind", KEYS)
def test_every_row_comes_once(postgres: str, kind: str) -> None:
    execute(postgres, "CREATE TYPE colour AS ENUM ('red', 'green')", "CREATE DOMAIN code AS char(8)")
    types = {"int, int": ("int", "int"), "colour": ("colour", "int")}.get(kind, (kind,))
    columns = ", ".join(f"k{number} {type_}" for number, type_ in enumerate(types))
    names = ", ".join(f"k{number}" for number in range(len(types)))
    execute(postgres, f"CREATE TABLE t ({columns}, PRIMARY KEY ({names}))")
    execute(postgres, f"INSERT INTO t SELECT {KEYS[kind].replace('%%', '%')} FROM generate_series(1, 350) g")
    reader = PostgresTables(
        PostgresServer(postgres, "the database"), "p", TablePatterns(("t",), "public"), creates=True, name="test"
    )
    found, after, is_last = [], None, False
    try:
        for _ in range(4):
            chunk = reader.read_chunk("public.t", after, 100)
            assert chunk is not None
            found += PostgresDecoder().decode_chunk(chunk.context, chunk.content).rows.to_pylist()
            after, is_last = chunk.last, chunk.is_last
    finally:
        reader.close()
    assert is_last
    assert len(found) == 350
    assert len({repr(row) for row in found}) == 350
