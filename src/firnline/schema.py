"""Table schemas: parse them from a spec, store them as JSON, and merge them.

A schema is a plain `pyarrow.Schema`. Supported column types:

| spec text                  | Arrow                                                     |
|----------------------------|-----------------------------------------------------------|
| `string`, `binary`         | string, binary                                            |
| `int32`, `int64`           | int32, int64                                              |
| `float32`, `float64`       | float, double                                             |
| `decimal(p,s)`             | decimal128, 1 <= p <= 38, 0 <= s <= p                     |
| `boolean` (or `bool`)      | bool                                                      |
| `timestamp`                | timestamp[us, UTC]                                        |
| `date`                     | date32                                                    |
| `json`                     | string, with the field metadata `firnline.type=json`      |
| `list<T>`                  | list                                                      |
| `map<T>`                   | map from string to T                                      |
| `struct<a:T,b:T>`          | struct                                                    |
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

import pyarrow as pa

__all__ = [
    "BAD_NAME_CHARACTERS",
    "RESCUED_COLUMN",
    "field_from_spec",
    "fingerprint",
    "is_column_name_ok",
    "is_json",
    "is_wider",
    "json_field",
    "merge",
    "merge_fields",
    "schema_from_json",
    "schema_from_spec",
    "schema_to_json",
    "type_to_text",
    "widen",
    "wider_columns",
]

RESCUED_COLUMN = "_rescued_data"
RESERVED_PREFIX = "_firnline"
TYPE_KEY = b"firnline.type"

BAD_NAME_CHARACTERS = frozenset(" ,;{}()\n\t=")  # Delta and Parquet without column mapping refuse them
_SCALARS: dict[str, pa.DataType] = {
    "string": pa.string(),
    "int32": pa.int32(),
    "int64": pa.int64(),
    "float32": pa.float32(),
    "float64": pa.float64(),
    "boolean": pa.bool_(),
    "timestamp": pa.timestamp("us", "UTC"),
    "date": pa.date32(),
    "binary": pa.binary(),
}
_NAMES = {value: name for name, value in _SCALARS.items()}
_NUMBERS = (pa.int32(), pa.int64(), pa.float32(), pa.float64())
_WIDER = {pa.int32(): (pa.int64(), pa.float64()), pa.int64(): (pa.float64(),)}


def is_column_name_ok(name: str) -> bool:
    """Whether a record's field may become a column under this name.

    Delta and Parquet without column mapping refuse some characters; Firnline keeps `_firnline*` and
    `_rescued_data` for itself.
    """
    if not name or name == RESCUED_COLUMN or name.startswith(RESERVED_PREFIX):
        return False
    return BAD_NAME_CHARACTERS.isdisjoint(name)


def is_json(field: pa.Field) -> bool:
    """Whether a field holds JSON text of any shape."""
    return bool(field.metadata) and field.metadata.get(TYPE_KEY) == b"json"


def json_field(name: str, nullable: bool = True) -> pa.Field:
    """Return a field that holds JSON text of any shape."""
    return pa.field(name, pa.string(), nullable, metadata={TYPE_KEY: b"json"})


# --- from a spec -----------------------------------------------------------------------------------------


class _TypeText:
    """A recursive descent parser over one type text."""

    def __init__(self, text: str) -> None:
        self.text = text
        self.at = 0

    def fail(self, problem: str) -> ValueError:
        rest = self.text[self.at :]
        return ValueError(f"type {self.text!r}: {problem} at {rest!r}" if rest else f"type {self.text!r}: {problem}")

    def spaces(self) -> None:
        while self.at < len(self.text) and self.text[self.at] == " ":
            self.at += 1

    def take(self, mark: str) -> bool:
        self.spaces()
        if self.text.startswith(mark, self.at):
            self.at += len(mark)
            return True
        return False

    def expect(self, mark: str) -> None:
        if not self.take(mark):
            raise self.fail(f"expected {mark!r}")

    def word(self, stop: str) -> str:
        self.spaces()
        start = self.at
        while self.at < len(self.text) and self.text[self.at] not in stop:
            self.at += 1
        return self.text[start : self.at].strip()

    def number(self) -> int:
        word = self.word(",)>")
        if not (word.isascii() and word.isdigit()):
            raise self.fail(f"expected a number, not {word!r},")
        return int(word)

    def field(self, name: str, nullable: bool = True) -> pa.Field:
        self.spaces()
        start = self.at
        word = self.word("<>(),:")
        if word == "json":
            return json_field(name, nullable)
        word = "boolean" if word == "bool" else word
        if word in _SCALARS:
            return pa.field(name, _SCALARS[word], nullable)
        if word == "decimal":
            return pa.field(name, self.decimal(), nullable)
        if word == "list":
            self.expect("<")
            item = self.field("item")
            self.expect(">")
            return pa.field(name, pa.list_(item), nullable)
        if word == "map":
            self.expect("<")
            value = self.field("value")
            self.expect(">")
            return pa.field(name, pa.map_(pa.string(), value), nullable)
        if word == "struct":
            return pa.field(name, self.struct(), nullable)
        self.at = start
        known = ", ".join([*_SCALARS, "decimal(p,s)", "list<T>", "map<T>", "struct<name:T,...>", "json"])
        raise self.fail(f"unknown type {word!r} (known: {known})")

    def decimal(self) -> pa.DataType:
        self.expect("(")
        precision = self.number()
        self.expect(",")
        scale = self.number()
        self.expect(")")
        if not (1 <= precision <= 38 and scale <= precision):
            raise ValueError(
                f"type {self.text!r}: decimal({precision},{scale}) needs 1 <= precision <= 38 and scale <= precision"
            )
        return pa.decimal128(precision, scale)

    def struct(self) -> pa.DataType:
        self.expect("<")
        fields: list[pa.Field] = []
        names: set[str] = set()
        while True:
            name = self.word(":<>,")
            if not is_column_name_ok(name):
                raise self.fail(f"{name!r} cannot be a field name")
            if name.lower() in names:
                raise self.fail(f"field {name!r} is there twice")
            names.add(name.lower())
            self.expect(":")
            fields.append(self.field(name))
            if self.take(">"):
                return pa.struct(fields)
            self.expect(",")


def field_from_spec(spec: Mapping[str, Any]) -> pa.Field:
    """Return the field that `{name, type, nullable}` describes; nullable by default.

    Raises:
        ValueError: naming the offending part.
    """
    unknown = sorted(set(spec) - {"name", "type", "nullable"})
    if unknown:
        raise ValueError(f"column {spec.get('name')!r}: unknown key {unknown[0]!r}")
    name, text, nullable = spec.get("name"), spec.get("type"), spec.get("nullable", True)
    if not isinstance(name, str) or not is_column_name_ok(name):
        raise ValueError(f"{name!r} cannot be a column name")
    if not isinstance(text, str):
        raise ValueError(f"column {name!r}: type must be a text, not {text!r}")
    if not isinstance(nullable, bool):
        raise ValueError(f"column {name!r}: nullable must be true or false, not {nullable!r}")
    parser = _TypeText(text)
    try:
        field = parser.field(name, nullable)
        parser.spaces()
        if parser.at != len(text):
            raise parser.fail("nothing more expected")
    except ValueError as exc:
        raise ValueError(f"column {name!r}: {exc}") from None
    return field


def schema_from_spec(specs: Iterable[Mapping[str, Any]]) -> pa.Schema:
    """Return the schema of a list of column specs; names must differ in more than case."""
    fields = [field_from_spec(spec) for spec in specs]
    seen: set[str] = set()
    for field in fields:
        if field.name.lower() in seen:
            raise ValueError(f"column {field.name!r} is there twice (names differ in more than case)")
        seen.add(field.name.lower())
    return pa.schema(fields)


# --- JSON ------------------------------------------------------------------------------------------------


def type_to_text(field: pa.Field) -> str:
    """Return the spec text of a field's type, for messages and previews."""
    kind = field.type
    if is_json(field):
        return "json"
    if kind in _NAMES:
        return _NAMES[kind]
    if pa.types.is_decimal128(kind):
        return f"decimal({kind.precision},{kind.scale})"
    if pa.types.is_list(kind):
        return f"list<{type_to_text(kind.value_field)}>"
    if pa.types.is_map(kind):
        return f"map<{type_to_text(kind.item_field)}>"
    if pa.types.is_struct(kind):
        return "struct<" + ",".join(f"{f.name}:{type_to_text(f)}" for f in kind) + ">"
    raise ValueError(f"column {field.name!r}: type {kind} is not supported")


def _field_to_json(field: pa.Field) -> dict[str, Any]:
    kind = field.type
    out: dict[str, Any] = {"name": field.name, "nullable": field.nullable}
    if pa.types.is_list(kind):
        out["type"] = {"list": _field_to_json(kind.value_field)}
    elif pa.types.is_map(kind):
        if kind.key_type != pa.string():
            raise ValueError(f"column {field.name!r}: map keys must be strings, not {kind.key_type}")
        out["type"] = {"map": _field_to_json(kind.item_field)}
    elif pa.types.is_struct(kind):
        out["type"] = {"struct": [_field_to_json(child) for child in kind]}
    else:
        out["type"] = type_to_text(field)
    extra = {key.decode(): value.decode() for key, value in (field.metadata or {}).items() if key != TYPE_KEY}
    if extra:
        out["metadata"] = extra
    return out


def _field_from_json(value: Mapping[str, Any]) -> pa.Field:
    name, kind, nullable = str(value["name"]), value["type"], bool(value["nullable"])
    if isinstance(kind, str):
        field = _TypeText(kind).field(name, nullable)
    elif "list" in kind:
        field = pa.field(name, pa.list_(_field_from_json(kind["list"])), nullable)
    elif "map" in kind:
        field = pa.field(name, pa.map_(pa.string(), _field_from_json(kind["map"])), nullable)
    elif "struct" in kind:
        field = pa.field(name, pa.struct([_field_from_json(child) for child in kind["struct"]]), nullable)
    else:
        raise ValueError(f"column {name!r}: unknown type {kind!r}")
    if "metadata" in value:
        field = field.with_metadata({**(field.metadata or {}), **value["metadata"]})
    return field


def schema_to_json(schema: pa.Schema) -> list[dict[str, Any]]:
    """Return a JSON value that `schema_from_json` turns back into an equal schema."""
    return [_field_to_json(field) for field in schema]


def own_columns(schema: pa.Schema) -> pa.Schema:
    """Return the columns of types that a spec may name; a table may also have others, which only other tools fill."""
    return pa.schema([field for field in schema if _is_own(field)])


def _is_own(field: pa.Field) -> bool:
    try:
        _field_to_json(field)
    except ValueError:
        return False
    return True


def schema_from_json(value: Sequence[Mapping[str, Any]]) -> pa.Schema:
    """Return the schema that `schema_to_json` wrote."""
    return pa.schema([_field_from_json(field) for field in value])


def fingerprint(schema: pa.Schema) -> str:
    """Return 16 hex digits that differ when names, order, types or nullability differ."""
    text = json.dumps(schema_to_json(schema), sort_keys=True, separators=(",", ":"), ensure_ascii=False)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


# --- merging ---------------------------------------------------------------------------------------------


def _is_nested(kind: pa.DataType) -> bool:
    return bool(pa.types.is_nested(kind))


def _merge_scalars(a: pa.DataType, b: pa.DataType) -> pa.DataType:
    if a == b:
        return a
    if a in _NUMBERS and b in _NUMBERS:
        return pa.int64() if pa.types.is_integer(a) and pa.types.is_integer(b) else pa.float64()
    if pa.types.is_decimal128(a) and pa.types.is_decimal128(b):
        scale = max(a.scale, b.scale)
        precision = max(a.precision - a.scale, b.precision - b.scale) + scale
        if precision <= 38:
            return pa.decimal128(precision, scale)
    return pa.string()


def merge_fields(a: pa.Field, b: pa.Field) -> pa.Field:
    """Return the field of a's name that takes the values of both.

    Numbers widen (int32, int64, float64); other scalars of two kinds become string; lists, maps and
    structs merge with their like; everything else becomes json.
    """
    nullable = a.nullable or b.nullable
    x, y = a.type, b.type
    if is_json(a) or is_json(b):
        return json_field(a.name, nullable)
    if not _is_nested(x) and not _is_nested(y):
        return pa.field(a.name, _merge_scalars(x, y), nullable, metadata=a.metadata)
    if pa.types.is_struct(x) and pa.types.is_struct(y):
        kind = pa.struct(_merge_all(list(x), list(y), None))
    elif pa.types.is_list(x) and pa.types.is_list(y):
        kind = pa.list_(merge_fields(x.value_field, y.value_field))
    elif pa.types.is_map(x) and pa.types.is_map(y):
        kind = pa.map_(pa.string(), merge_fields(x.item_field, y.item_field))
    else:
        return json_field(a.name, nullable)
    return pa.field(a.name, kind, nullable, metadata=a.metadata)


def _merge_frozen(a: pa.Field, b: pa.Field) -> pa.Field:
    """Keep a's type; structs, also those in lists and maps, gain the fields that only b has."""
    x, y = a.type, b.type
    if pa.types.is_struct(x) and pa.types.is_struct(y):
        return a.with_type(pa.struct(_merge_all(list(x), list(y), {f.name for f in x})))
    if pa.types.is_list(x) and pa.types.is_list(y):
        return a.with_type(pa.list_(_merge_frozen(x.value_field, y.value_field)))
    if pa.types.is_map(x) and pa.types.is_map(y):
        return a.with_type(pa.map_(pa.string(), _merge_frozen(x.item_field, y.item_field)))
    return a


def _merge_all(a: list[pa.Field], b: list[pa.Field], frozen: Collection[str] | None) -> list[pa.Field]:
    kept = frozen or ()
    merged = {field.name: field for field in a}
    others = {field.name: field for field in b}
    out: dict[str, pa.Field] = {}
    for name, field in merged.items():
        other = others.get(name)
        if name in kept:
            out[name] = field if other is None else _merge_frozen(field, other)
        else:
            out[name] = field.with_nullable(True) if other is None else merge_fields(field, other)
    spelled = {name.lower(): name for name in out}
    for name, field in others.items():
        if name in merged:
            continue
        field = field if name in kept else field.with_nullable(True)
        rival = spelled.setdefault(name.lower(), name)
        if rival == name:
            out[name] = field
        elif rival not in kept and name < rival:
            # Names that differ in case alone cannot live in one table. The choice must not depend on the
            # order of merging: the first in byte order stays.
            out = {name if key == rival else key: field if key == rival else value for key, value in out.items()}
            spelled[name.lower()] = name
    return list(out.values())


def merge(a: pa.Schema, b: pa.Schema, frozen: Collection[str]) -> pa.Schema:
    """Return the union of the columns: a's in a's order, then those that only b has.

    Columns in `frozen` keep a's type; a struct among them may still gain fields. Any other column takes a
    type that holds the values of both sides (see `merge_fields`), and is nullable when one side lacks it.
    Associative and idempotent; with nothing frozen also commutative, but for the order of columns.
    """
    return pa.schema(_merge_all(list(a), list(b), frozen), metadata=a.metadata)


# --- widening --------------------------------------------------------------------------------------------


def is_wider(old: pa.DataType, new: pa.DataType) -> bool:
    """Return whether a column of the type `old` may become one of the type `new`: int32 int64, integers float64.

    A double does not represent every integer beyond 2^53: whoever widens checks the values.
    """
    return new in _WIDER.get(old, ())


def wider_columns(old: pa.Schema, new: pa.Schema) -> dict[str, pa.DataType]:
    """Return the columns of `old` that have a wider type in `new`, with that type. Nested fields do not count."""
    return {
        field.name: new.field(field.name).type
        for field in old
        if new.get_field_index(field.name) >= 0 and is_wider(field.type, new.field(field.name).type)
    }


def widen(schema: pa.Schema, types: Mapping[str, pa.DataType]) -> pa.Schema:
    """Return the schema with other types of these columns."""
    fields = [field.with_type(types[field.name]) if field.name in types else field for field in schema]
    return pa.schema(fields, metadata=schema.metadata)
