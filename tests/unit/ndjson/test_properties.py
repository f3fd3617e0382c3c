"""Random records, schemas, cuts and damage against Python's own JSON reader as oracle."""

from __future__ import annotations

import io
import json
import math
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from firnline.ndjson import Decoded, DecodeOptions, Decoder, decode, open_blocks
from firnline.schema import RESCUED_COLUMN, is_json, schema_from_spec

PLAIN = settings(deadline=None, derandomize=True, max_examples=250, suppress_health_check=list(HealthCheck))

_names = st.sampled_from(["a", "b", "c", "A", "id", "größe", "a b", "_rescued_data", "long_key_name_past_16_bytes", ""])
_numbers = (
    st.integers(-(2**70), 2**70)
    | st.integers(-5, 5)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.sampled_from(
        [0.0, -0.0, 1e22, 1e23, 5e-324, 2.2250738585072014e-308, 1.7976931348623157e308, 2**53 + 1, 2**63]
    )
)
_scalars = (
    st.none()
    | st.booleans()
    | _numbers
    | st.text(max_size=20)
    | st.sampled_from(['"', "\\", "\n", "\u2028😀é", "x" * 70])
)
_values = st.recursive(
    _scalars,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(_names, inner, max_size=3),
    max_leaves=8,
)
_records = st.dictionaries(_names, _values, max_size=5)


@st.composite
def texts(draw: st.DrawFn, records: st.SearchStrategy[Any]) -> bytes:
    """Lines of records in several ways of writing the same JSON."""
    lines = []
    for record in draw(st.lists(records, min_size=1, max_size=8)):
        gap = draw(st.sampled_from(["", " ", "\t "]))
        line = json.dumps(record, ensure_ascii=draw(st.booleans()), separators=("," + gap, gap + ":" + gap))
        if draw(st.booleans()):
            line = line.replace("/", "\\/")
        lines.append(gap + line + draw(st.sampled_from(["", "\r", " "])))
    return "\n".join(lines).encode("utf-8", "surrogatepass")


def _decode(
    text: bytes, schema: pa.Schema, frozen: Any = (), size: int = 1 << 20, **options: Any
) -> tuple[Decoder, list[Decoded]]:
    decoder = Decoder(schema, frozen, DecodeOptions(**options))
    blocks = open_blocks(io.BytesIO(text), path="f", compression=None, block_bytes=size)
    return decoder, [decoder.decode(block) for block in blocks]


def _strict(line: bytes) -> Any:
    """Parse as RFC 8259 wants it, or raise ValueError."""

    def refuse(text: str) -> None:
        raise ValueError(text)

    value = json.loads(line.decode(), parse_constant=refuse)
    json.dumps(value, ensure_ascii=False).encode()  # lone surrogates do not encode
    return value


def _same(a: Any, b: Any) -> bool:
    """Compare parsed JSON; a boolean is no number, and zero has a sign."""
    if isinstance(a, dict) and isinstance(b, dict):
        return a.keys() == b.keys() and all(_same(a[key], b[key]) for key in a)
    if isinstance(a, list) and isinstance(b, list):
        return len(a) == len(b) and all(map(_same, a, b))
    if isinstance(a, bool) or isinstance(b, bool):
        return a is b
    if isinstance(a, float) and isinstance(b, float):
        return a == b and math.copysign(1, a) == math.copysign(1, b)
    return type(a) is type(b) and bool(a == b)


def _holds(field: pa.Field, got: Any, value: Any) -> bool:
    """Tell whether a column's value says the same as the JSON value, nothing lost."""
    if value is None:
        return got is None
    if got is None:
        return False
    if is_json(field):
        return _same(json.loads(got), value)
    kind = field.type
    if pa.types.is_struct(kind):
        fields = {child.name: child for child in kind}
        extra = [key for key in value if key not in fields and value[key] is not None]
        return not extra and all(_holds(child, got[name], value.get(name)) for name, child in fields.items())
    if pa.types.is_list(kind):
        return len(got) == len(value) and all(_holds(kind.value_field, g, v) for g, v in zip(got, value, strict=True))
    if pa.types.is_map(kind):
        return [key for key, _ in got] == list(value) and all(_holds(kind.item_field, g, value[key]) for key, g in got)
    if pa.types.is_string(kind) and not isinstance(value, str):
        return _same(json.loads(got), value)
    if pa.types.is_floating(kind):
        return not isinstance(value, bool) and got == value and math.copysign(1, got) == math.copysign(1, float(value))
    return type(got) is type(value) and bool(got == value)


def _complete(
    fields: dict[str, pa.Field], row: dict[str, Any], rescued: dict[str, Any], record: dict[str, Any]
) -> None:
    """Assert that each field of the record is in its column or rescued, and in one of them only."""
    for name in {*fields, *record, *rescued}:
        value, field = record.get(name), fields.get(name)
        got = row.get(name) if field is not None else None
        if field is not None and isinstance(value, dict) and got is not None and pa.types.is_struct(field.type):
            _complete({child.name: child for child in field.type}, got, rescued.get(name, {}), value)
        elif name in rescued:
            assert got is None
            assert _same(rescued[name], value)
        else:
            assert field is not None or value is None
            assert field is None or _holds(field, got, value)


def _assert_complete(decoded: list[Decoded], records: list[dict[str, Any]]) -> None:
    rows = [row for part in decoded for row in part.batch.to_pylist()]
    schemas = [part.batch.schema for part in decoded for _ in range(part.batch.num_rows)]
    assert len(rows) == len(records)
    for row, schema, record in zip(rows, schemas, records, strict=True):
        fields = {field.name: field for field in schema if field.name != RESCUED_COLUMN}
        _complete(fields, row, json.loads(row.get(RESCUED_COLUMN) or "{}"), record)


@given(texts(_records), st.sampled_from([40, 300, 1 << 20]), st.sampled_from(["add", "rescue"]))
@PLAIN
def test_every_field_lands_in_a_column_or_is_rescued(text: bytes, size: int, evolution: Any) -> None:
    decoder, decoded = _decode(text, pa.schema([]), size=size, evolution=evolution)
    _assert_complete(decoded, [json.loads(line) for line in text.split(b"\n")])
    assert decoded[-1].batch.schema.equals(decoder.schema, check_metadata=True)
    for part in decoded:
        part.batch.validate(full=True)


_types = st.recursive(
    st.sampled_from(["string", "int32", "int64", "float64", "boolean", "json"]),
    lambda inner: (
        inner.map(lambda t: f"list<{t}>")
        | inner.map(lambda t: f"map<{t}>")
        | st.tuples(inner, inner).map(lambda t: f"struct<a:{t[0]},id:{t[1]}>")
    ),
    max_leaves=4,
)
_schemas = st.lists(
    st.tuples(st.sampled_from(["a", "b", "id", "größe"]), _types), unique_by=lambda t: t[0], max_size=4
).map(lambda items: schema_from_spec([{"name": name, "type": kind} for name, kind in items]))


@given(texts(_records), _schemas, st.booleans(), st.sampled_from(["add", "rescue"]))
@PLAIN
def test_a_given_schema_loses_nothing_and_frozen_types_stay(
    text: bytes, schema: pa.Schema, frozen: bool, evolution: Any
) -> None:
    decoder, decoded = _decode(text, schema, schema.names if frozen else (), evolution=evolution)
    _assert_complete(decoded, [json.loads(line) for line in text.split(b"\n")])
    if frozen and evolution == "rescue":
        assert decoder.schema.remove_metadata().names[: len(schema)] == schema.names
        assert all(decoder.schema.field(field.name).equals(field, check_metadata=True) for field in schema)


@given(texts(_records), _schemas, st.booleans())
@PLAIN
def test_the_compiled_walk_and_the_exact_path_agree(text: bytes, schema: pa.Schema, frozen: bool) -> None:
    names = schema.names if frozen else ()
    fast, quick = _decode(text, schema, names)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(decode, "is_ready", lambda: False)
        patch.setattr(decode, "compile_beside", lambda: None)
        exact, slow = _decode(text, schema, names)
    assert fast.schema.equals(exact.schema, check_metadata=True)
    for a, b in zip(quick, slow, strict=True):
        assert repr(a.batch.to_pylist()) == repr(b.batch.to_pylist())
        assert (a.record_numbers, a.bad) == (b.record_numbers, b.bad)


_TROUBLE = b'"{}[]:,\\-.eEtfn0 \x00\x7f\xc3\xed\xa0\xf0'
_LINE = json.dumps(
    {
        "id": 17,
        "s": "aé😀\n\u00e9",
        "f": -12.5e3,
        "o": {"x": [1, 2, {"y": None}], "t": True},
        "m": {"k": 1.5},
        "j": [{}, "z"],
    }
).encode()
_WIDE = schema_from_spec(
    [
        {"name": "id", "type": "int64"},
        {"name": "s", "type": "string"},
        {"name": "f", "type": "float64"},
        {"name": "o", "type": "struct<x:list<json>,t:boolean>"},
        {"name": "m", "type": "map<float64>"},
        {"name": "j", "type": "json"},
    ]
)


def _reason(line: bytes) -> str | None:
    try:
        line.decode()
    except UnicodeDecodeError:
        return "invalid-utf8"
    try:
        value = _strict(line)
    except (ValueError, RecursionError):
        return "not-json"
    return None if isinstance(value, dict) else "not-an-object"


@pytest.mark.parametrize("schema", [_WIDE, pa.schema([])])
def test_damaged_lines_are_told_from_good_ones_exactly(schema: pa.Schema) -> None:
    rng = np.random.default_rng(7)
    good = [_LINE, json.dumps(json.loads(_LINE), ensure_ascii=False).encode()]
    lines = []
    for _ in range(6_000):
        damaged = bytearray(good[rng.integers(2)])
        for _ in range(rng.integers(1, 3)):
            choice = rng.integers(4)
            at = int(rng.integers(len(damaged)))
            if choice == 0:
                damaged[at] = rng.integers(256)
            elif choice == 1:
                del damaged[at]
            elif choice == 2:
                damaged.insert(at, _TROUBLE[rng.integers(len(_TROUBLE))])
            else:
                del damaged[at:]
                damaged += b" "
        lines.append(bytes(damaged).replace(b"\n", b"") or b"0")
    lines = [line for line in lines if line.strip(b" \t\r")]
    decoder = Decoder(schema, schema.names, DecodeOptions(evolution="rescue"))
    blocks = open_blocks(io.BytesIO(b"\n".join(lines)), path="f", compression=None, block_bytes=1 << 16)
    bad = {item.record: item for block in blocks for item in decoder.decode(block).bad}
    for number, line in enumerate(lines):
        found = bad.get(number)
        assert (found.reason if found else None) == _reason(line), line
        assert found is None or (found.raw == line and found.line == number + 1)


@given(st.lists(st.binary(max_size=40), max_size=20), st.binary(max_size=3))
@PLAIN
def test_any_bytes_are_counted_and_never_crash(lines: list[bytes], end: bytes) -> None:
    text = b"\n".join(lines) + end
    _, decoded = _decode(text, _WIDE, _WIDE.names, size=64)
    total = sum(part.batch.num_rows + len(part.bad) for part in decoded)
    body = text[3:] if text.startswith(b"\xef\xbb\xbf") else text
    assert total == sum(1 for line in body.split(b"\n") if line.strip(b" \t\r"))


@given(texts(_records), st.integers(1, 3))
@PLAIN
def test_cuts_change_nothing(text: bytes, cut: int) -> None:
    decoder, whole = _decode(text, pa.schema([]))
    known = decoder.schema
    _, whole = _decode(text, known, known.names, evolution="rescue")
    rows: list[Any] = []
    numbers: list[int] = []
    again = Decoder(known, known.names, DecodeOptions(evolution="rescue"))
    done = 0
    while True:
        reader = open_blocks(io.BytesIO(text), path="f", compression=None, skip_records=done, max_records=cut)
        for block in reader:
            part = again.decode(block)
            rows += part.batch.to_pylist()
            numbers += part.record_numbers.to_pylist()
        done = reader.records_read
        if reader.finished:
            break
    # The column for what does not fit comes with the first block that needs it: before, it is null.
    expected = [row for part in whole for row in part.batch.to_pylist()]
    assert repr([{RESCUED_COLUMN: None, **row} for row in rows]) == repr(
        [{RESCUED_COLUMN: None, **row} for row in expected]
    )
    assert numbers == list(range(len(rows)))
