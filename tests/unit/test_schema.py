"""Schemas: parsing, JSON, fingerprints, and a merge that does not depend on order."""

from __future__ import annotations

import json
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from firnline.schema import (
    field_from_spec,
    fingerprint,
    is_column_name_ok,
    is_json,
    merge,
    schema_from_json,
    schema_from_spec,
    schema_to_json,
    type_to_text,
)


def _schema(**columns: str) -> pa.Schema:
    return schema_from_spec([{"name": name, "type": kind} for name, kind in columns.items()])


def _texts(schema: pa.Schema) -> dict[str, str]:
    return {field.name: type_to_text(field) for field in schema}


_names = st.sampled_from(["a", "b", "c", "A", "id", "größe"])
_scalars = st.sampled_from(
    ["string", "int32", "int64", "float32", "float64", "boolean", "timestamp", "date", "binary", "json"]
) | st.builds(lambda p, s: f"decimal({p},{min(p, s)})", st.integers(1, 38), st.integers(0, 38))


def _deeper(types: st.SearchStrategy[str]) -> st.SearchStrategy[str]:
    fields = st.lists(st.tuples(_names, types), min_size=1, max_size=3, unique_by=lambda item: item[0].lower())
    return (
        types.map(lambda inner: f"list<{inner}>")
        | types.map(lambda inner: f"map<{inner}>")
        | fields.map(lambda items: "struct<" + ",".join(f"{name}:{kind}" for name, kind in items) + ">")
    )


_types = st.recursive(_scalars, _deeper, max_leaves=5)


@st.composite
def schemas(draw: st.DrawFn) -> pa.Schema:
    columns = draw(
        st.lists(st.tuples(_names, _types, st.booleans()), max_size=4, unique_by=lambda item: item[0].lower())
    )
    return schema_from_spec([{"name": n, "type": t, "nullable": nullable} for n, t, nullable in columns])


def _canonical(field: pa.Field) -> Any:
    """Return the field without regard to the order of struct fields."""
    kind = field.type
    if pa.types.is_struct(kind):
        inner: Any = sorted((_canonical(child) for child in kind), key=repr)
    elif pa.types.is_list(kind):
        inner = _canonical(kind.value_field)
    elif pa.types.is_map(kind):
        inner = _canonical(kind.item_field)
    else:
        inner = type_to_text(field)
    return (field.name, str(kind.id), field.nullable, inner)


def _unordered(schema: pa.Schema) -> list[Any]:
    return sorted((_canonical(field) for field in schema), key=repr)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("string", pa.string()),
        ("bool", pa.bool_()),
        (" decimal( 18 , 2 ) ", pa.decimal128(18, 2)),
        ("timestamp", pa.timestamp("us", "UTC")),
        ("list<list<date>>", pa.list_(pa.list_(pa.date32()))),
        ("map<int64>", pa.map_(pa.string(), pa.int64())),
        ("struct<a:int64,b:list<string>>", pa.struct([("a", pa.int64()), ("b", pa.list_(pa.string()))])),
    ],
)
def test_type_texts_are_read(text: str, expected: pa.DataType) -> None:
    assert field_from_spec({"name": "x", "type": text}).type == expected


def test_json_is_a_tagged_string() -> None:
    field = field_from_spec({"name": "x", "type": "json", "nullable": False})
    assert field.type == pa.string()
    assert is_json(field)
    assert not field.nullable
    assert not is_json(field_from_spec({"name": "x", "type": "string"}))


@pytest.mark.parametrize(
    ("spec", "part"),
    [
        ({"name": "x", "type": "strng"}, "strng"),
        ({"name": "x", "type": "list<int64"}, "expected '>'"),
        ({"name": "x", "type": "list<int64>>"}, "nothing more expected at '>'"),
        ({"name": "x", "type": "decimal(40,2)"}, "decimal(40,2)"),
        ({"name": "x", "type": "decimal(4,5)"}, "decimal(4,5)"),
        ({"name": "x", "type": "decimal(a,5)"}, "'a'"),
        ({"name": "x", "type": "struct<a:int64,a:string>"}, "'a' is there twice"),
        ({"name": "x", "type": "struct<>"}, "''"),
        ({"name": "x", "type": "struct<a b:int64>"}, "'a b'"),
        ({"name": "x", "type": ""}, "unknown type ''"),
        ({"name": "x", "type": 7}, "7"),
        ({"name": "x y", "type": "int64"}, "'x y'"),
        ({"name": "x", "type": "int64", "null": True}, "'null'"),
        ({"name": "x", "type": "int64", "nullable": "no"}, "'no'"),
    ],
)
def test_a_wrong_spec_is_refused_naming_the_part(spec: dict[str, Any], part: str) -> None:
    with pytest.raises(ValueError) as caught:
        field_from_spec(spec)
    assert part in str(caught.value)


def test_columns_that_differ_in_case_alone_are_refused() -> None:
    with pytest.raises(ValueError, match="twice"):
        _schema(a="int64", A="int64")


@pytest.mark.parametrize(
    "name",
    ["", "a b", "a,b", "a;", "{", "}", "(", ")", "a\n", "a\tb", "a=b", "_rescued_data", "_firnline", "_firnline_x"],
)
def test_names_that_tables_cannot_hold_are_refused(name: str) -> None:
    assert not is_column_name_ok(name)


@pytest.mark.parametrize("name", ["a", "A-b", "größe", "a.b", "_x", "1"])
def test_other_names_are_fine(name: str) -> None:
    assert is_column_name_ok(name)


@given(schemas())
@settings(deadline=None, derandomize=True)
def test_json_gives_the_same_schema_back(schema: pa.Schema) -> None:
    value = json.loads(json.dumps(schema_to_json(schema)))
    assert schema_from_json(value).equals(schema, check_metadata=True)
    assert fingerprint(schema_from_json(value)) == fingerprint(schema)


def test_json_keeps_nested_nullability_and_metadata() -> None:
    inner = pa.field("item", pa.int64(), nullable=False)
    schema = pa.schema([pa.field("a", pa.list_(inner), metadata={"comment": "x"})])
    found = schema_from_json(schema_to_json(schema))
    assert found.equals(schema, check_metadata=True)
    assert not found.field("a").type.value_field.nullable


def test_the_fingerprint_is_stable_and_tells_schemas_apart() -> None:
    assert fingerprint(_schema(a="int64")) == fingerprint(_schema(a="int64"))
    others = [_schema(a="int32"), _schema(b="int64"), _schema(a="json"), _schema(a="string"), _schema()]
    assert len({fingerprint(schema) for schema in others} | {fingerprint(_schema(a="int64"))}) == 6
    assert len(fingerprint(_schema())) == 16


def test_unsupported_types_are_refused() -> None:
    with pytest.raises(ValueError, match="uint8"):
        schema_to_json(pa.schema([("a", pa.uint8())]))


@pytest.mark.parametrize(
    ("a", "b", "expected"),
    [
        ("int64", "float64", "float64"),
        ("int32", "int64", "int64"),
        ("int64", "boolean", "string"),
        ("string", "float64", "string"),
        ("timestamp", "date", "string"),
        ("decimal(10,2)", "decimal(12,4)", "decimal(12,4)"),
        ("decimal(38,0)", "decimal(38,38)", "string"),
        ("int64", "list<int64>", "json"),
        ("struct<a:int64>", "string", "json"),
        ("struct<a:int64>", "map<int64>", "json"),
        ("json", "int64", "json"),
        ("list<int64>", "list<float64>", "list<float64>"),
        ("list<int64>", "list<list<int64>>", "list<json>"),
        ("struct<a:int64>", "struct<b:string,a:float64>", "struct<a:float64,b:string>"),
    ],
)
def test_merging_two_types(a: str, b: str, expected: str) -> None:
    assert _texts(merge(_schema(x=a), _schema(x=b), ())) == {"x": expected}


def test_new_columns_come_last_and_are_nullable() -> None:
    b = schema_from_spec([{"name": "z", "type": "int64", "nullable": False}, {"name": "a", "type": "int64"}])
    merged = merge(_schema(a="int64", k="string"), b, ())
    assert merged.names == ["a", "k", "z"]
    assert merged.field("z").nullable


def test_frozen_columns_keep_their_type_but_structs_gain_fields() -> None:
    a = schema_from_spec(
        [
            {"name": "n", "type": "int64", "nullable": False},
            {"name": "s", "type": "struct<a:int64>"},
            {"name": "l", "type": "list<struct<a:int64>>"},
        ]
    )
    b = _schema(n="string", s="struct<a:string,b:string>", l="list<struct<c:int64>>", new="int64")
    merged = merge(a, b, frozen=["n", "s", "l"])
    assert _texts(merged) == {
        "n": "int64",
        "s": "struct<a:int64,b:string>",
        "l": "list<struct<a:int64,c:int64>>",
        "new": "int64",
    }
    assert not merged.field("n").nullable


def test_of_names_that_differ_in_case_alone_one_stays() -> None:
    assert _texts(merge(_schema(ab="int64"), _schema(AB="string"), ())) == {"AB": "string"}
    assert _texts(merge(_schema(AB="string"), _schema(ab="int64"), ())) == {"AB": "string"}
    assert _texts(merge(_schema(ab="int64"), _schema(AB="string"), frozen=["ab"])) == {"ab": "int64"}


@given(schemas(), schemas(), schemas())
@settings(deadline=None, derandomize=True, max_examples=300)
def test_merge_is_associative(a: pa.Schema, b: pa.Schema, c: pa.Schema) -> None:
    left = merge(merge(a, b, ()), c, ())
    right = merge(a, merge(b, c, ()), ())
    assert _unordered(left) == _unordered(right)


@given(schemas(), schemas())
@settings(deadline=None, derandomize=True, max_examples=300)
def test_merge_is_commutative_but_for_order(a: pa.Schema, b: pa.Schema) -> None:
    assert _unordered(merge(a, b, ())) == _unordered(merge(b, a, ()))


@given(schemas(), schemas())
@settings(deadline=None, derandomize=True)
def test_merge_is_idempotent(a: pa.Schema, b: pa.Schema) -> None:
    assert merge(a, a, ()).equals(a, check_metadata=True)
    once = merge(a, b, ())
    assert merge(once, b, ()).equals(once)
    assert merge(once, a, ()).equals(once)


@given(schemas(), schemas(), schemas())
@settings(deadline=None, derandomize=True)
def test_a_frozen_schema_never_changes_type(a: pa.Schema, b: pa.Schema, c: pa.Schema) -> None:
    merged = merge(merge(a, b, a.names), c, a.names)
    for field in a:
        if not pa.types.is_nested(field.type):
            assert merged.field(field.name).equals(field, check_metadata=True)
    assert _unordered(merged) == _unordered(merge(a, merge(b, c, a.names), a.names))
