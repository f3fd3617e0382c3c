"""The types of new columns: chosen by all values of an epoch, whatever their order and the tasks that read them."""

from __future__ import annotations

import io
import json
import random
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from deltalake import DeltaTable

from firnline.ndjson import DecodeOptions, Decoder, KindCounter, choose, open_blocks
from firnline.ndjson.infer import Choice
from firnline.schema import RESCUED_COLUMN, schema_from_json, schema_from_spec, schema_to_json, type_to_text
from firnline.sources.base import ReadColumns
from firnline.sources.columns import Columns, agree
from tests.support.pipelines import pipeline_options, run_once


@pytest.mark.parametrize(
    ("counts", "expected"),
    [
        ({"int64": 62_996, "string": 1}, Choice("int64", 62_997, 1)),
        ({"int64": 95, "string": 5}, Choice("int64", 100, 5)),
        ({"int64": 94, "string": 6}, Choice("string", 100, 0)),
        ({"int64": 18, "string": 1}, Choice("string", 19, 0)),  # of few values one is a real share
        ({"int64": 100, "float64": 1}, Choice("float64", 101, 0)),
        ({"int64": 999, "float64": 1}, Choice("int64", 1000, 1)),
        ({"int64": 998, "float64": 2}, Choice("float64", 1000, 0)),
        ({"int64": 999, "number": 1, "whole": 0}, Choice("int64", 1000, 1)),
        ({"number": 1000, "whole": 998}, Choice("float64", 1000, 0)),
        ({"number": 1000, "whole": 999}, Choice(None, 1000, 0)),
        ({"int64": 100, "large": 100, "float64": 1}, Choice("int64", 101, 1)),
        ({"int64": 100, "large": 2, "float64": 1}, Choice("int64", 101, 1)),
        ({"int64": 100, "large": 100, "number": 1}, Choice("int64", 101, 1)),
        ({"int64": 100, "large": 100, "number": 1, "whole": 1}, Choice(None, 101, 0)),
        ({"int64": 50, "large": 1, "float64": 50}, Choice("float64", 100, 1)),
        ({"int64": 50, "large": 50, "float64": 50, "string": 50}, Choice("string", 150, 0)),
        ({"boolean": 99, "int64": 1}, Choice("boolean", 100, 1)),
        ({"boolean": 50, "int64": 50}, Choice("string", 100, 0)),
        ({"object": 99, "string": 1}, Choice("object", 100, 1)),
        ({"array": 40, "object": 60}, Choice("json", 100, 0)),
        ({"string": 97, "array": 3}, Choice("string", 100, 3)),
        ({"string": 50, "array": 50}, Choice("json", 100, 0)),
    ],
)
def test_the_kind_that_nearly_all_values_have_is_chosen(counts: dict[str, int], expected: Choice) -> None:
    assert choose("a", counts) == expected


def test_what_lies_too_deep_stays_json() -> None:
    assert choose("\n".join("a" * 32), {"object": 5}).kind == "json"
    assert choose("\n".join("a" * 31), {"object": 5}).kind == "object"


# -- tasks come to an agreement -----------------------------------------------------------------------

_ODD: tuple[Any, ...] = (
    None,
    True,
    7,
    2**60 + 1,
    10**30,
    0.5,
    "x",
    [],
    [1],
    ["x"],
    {},
    {"a": 1},
    {"b": "x"},
    [{"c": 1}],
)


def _read(columns: Columns, lines: Sequence[str]) -> tuple[ReadColumns, list[dict[str, Any]]]:
    """What a task reports of its columns, and its rows."""
    options = DecodeOptions(kinds=columns.kinds)
    decoder = Decoder(columns.decoded, columns.frozen, options)
    counter = KindCounter(columns.decoded, columns.frozen, ())
    rows: list[dict[str, Any]] = []
    text = "\n".join(lines).encode()
    for block in open_blocks(io.BytesIO(text), path="f", compression=None, block_bytes=64):
        batch = decoder.decode(block).batch
        counter.add(batch)
        rows += batch.to_pylist()
    return ReadColumns(schema_from_json(schema_to_json(decoder.schema)), counter.to_json()), rows


def _agree(columns: Columns, tasks: Sequence[Sequence[str]]) -> tuple[Columns, list[list[dict[str, Any]]]]:
    found = [_read(columns, lines) for lines in tasks]
    for _ in range(8):
        columns, again = agree(columns, [read for read, _ in found])
        if not again:
            return columns, [rows for _, rows in found]
        found = [_read(columns, tasks[n]) if n in again else found[n] for n in range(len(tasks))]
    raise AssertionError("the tasks do not come to an agreement")


def _types(schema: pa.Schema) -> dict[str, Any]:
    def plain(field: pa.Field) -> Any:
        if pa.types.is_struct(field.type):
            return {child.name: plain(child) for child in field.type}
        return [plain(field.type.value_field)] if pa.types.is_list(field.type) else type_to_text(field)

    return {field.name: plain(field) for field in schema if field.name != RESCUED_COLUMN}


@pytest.mark.parametrize("seed", range(60))
def test_types_depend_on_the_values_alone(seed: int) -> None:
    draw = random.Random(seed)
    usual = {name: draw.choice(_ODD) for name in "pqrs"}
    share = draw.choice([0.0, 0.01, 0.04, 0.3])
    records = []
    for _ in range(draw.choice([5, 60, 150])):
        record = {name: value for name, value in usual.items() if draw.random() < 0.9}
        records.append({name: draw.choice(_ODD) if draw.random() < share else v for name, v in record.items()})
    lines = [json.dumps(record) for record in records]
    columns = Columns(schema_from_spec([{"name": "p", "type": "int64"}]), frozenset({"p"}), {})
    chosen = []
    for tasks in (1, 2, 5):
        draw.shuffle(lines)
        found, rows = _agree(columns, [lines[n::tasks] for n in range(tasks)])
        chosen.append(_types(found.decoded))
        assert sum(map(len, rows)) == len(lines)
        assert Counter(_told(row) for part in rows for row in part) == Counter(_told_record(line) for line in lines)
    assert chosen[1:] == chosen[:1] * 2


def _told(row: dict[str, Any]) -> str:
    """The names of the fields that a row holds a value of, in columns or rescued."""
    rescued = json.loads(row.get(RESCUED_COLUMN) or "{}")
    return " ".join(
        sorted({name for name, value in row.items() if value is not None} - {RESCUED_COLUMN} | set(rescued))
    )


def _told_record(line: str) -> str:
    return " ".join(sorted(name for name, value in json.loads(line).items() if value is not None))


# -- end to end ---------------------------------------------------------------------------------------


def _ids(table: Path) -> tuple[pa.DataType, list[Any], list[str]]:
    rows = pa.table(DeltaTable(str(table)).to_pyarrow_table())
    rescued = rows[RESCUED_COLUMN].drop_null().to_pylist() if RESCUED_COLUMN in rows.column_names else []
    return rows.schema.field("id").type, rows["id"].to_pylist(), rescued


@pytest.mark.parametrize("first", ["odd-first", "odd-last"])
def test_one_odd_record_does_not_spoil_a_column(tmp_path: Path, first: str) -> None:
    folder = tmp_path / "in"
    folder.mkdir()
    lines = [json.dumps({"id": n}) for n in range(300)]
    lines.insert(0 if first == "odd-first" else 300, '{"id": "not-a-number"}')
    for part in range(3):
        (folder / f"a{part}.json").write_text("\n".join(lines[part * 101 : (part + 1) * 101]))
    options = pipeline_options(str(folder), str(tmp_path / "out"))
    assert run_once(options, threads=2).exit_code == 0
    (folder / "b.json").write_text('{"id": 300}\n{"id": "nor this"}\n')
    assert run_once(options, threads=2).exit_code == 0
    kind, ids, rescued = _ids(tmp_path / "out")
    assert kind == pa.int64()
    assert sorted(i for i in ids if i is not None) == list(range(301))
    assert sorted(rescued) == ['{"id":"nor this"}', '{"id":"not-a-number"}']


def test_numbers_and_booleans_that_meet_a_text_column_are_kept_as_text(tmp_path: Path) -> None:
    folder = tmp_path / "in"
    folder.mkdir()
    options = pipeline_options(str(folder), str(tmp_path / "out"))
    (folder / "a.json").write_text('{"id": "x"}\n')
    assert run_once(options).exit_code == 0
    (folder / "b.json").write_text(
        '{"id": 7}\n{"id": 1.50}\n{"id": true}\n{"id": 123456789012345678901234567890}\n{"id": [1]}\n'
    )
    assert run_once(options).exit_code == 0
    kind, ids, rescued = _ids(tmp_path / "out")
    assert kind == pa.string()
    assert sorted(i for i in ids if i is not None) == ["1.50", "123456789012345678901234567890", "7", "true", "x"]
    assert rescued == ['{"id":[1]}']
