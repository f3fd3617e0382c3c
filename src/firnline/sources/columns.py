"""Decides which columns the rows of a port have, and how the splits of an epoch agree on them. Pure."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import pyarrow as pa

from firnline.ndjson import add_counts, apply_kinds, choose, json_paths, kinds_of
from firnline.ndjson.infer import FEW_FRACTIONS, Counts
from firnline.ndjson.tree import outer_paths
from firnline.options import SourceOptions
from firnline.rescued import Rescued
from firnline.schema import is_json, is_wider, merge, schema_from_json, schema_from_spec, schema_to_json
from firnline.sources.base import MAIN_PORT, ReadColumns
from firnline.types import BadReason, Json

LINEAGE_TYPES = (pa.string(), pa.int64(), pa.int64())
IS_DECLARED = "it is declared in the spec"


@dataclass(frozen=True, slots=True)
class Columns:
    """The origin of the columns of one port in an epoch; sent to workers as plain JSON."""

    decoded: pa.Schema  # from records
    frozen: frozenset[str]  # their types are fixed: the table has them, or the spec declares them
    constants: dict[str, str]  # the same in all rows of an input, such as `name=value` folders, with their types
    reserved: frozenset[str] = frozenset()  # never taken from records: such values are rescued
    kinds: dict[str, str] = field(default_factory=dict)  # by path: types of new fields, chosen by all values
    evolution: Literal["add", "rescue", "fail"] = "add"  # what an unknown field becomes
    infer_timestamps: bool = True  # new columns of time stamps become timestamp columns
    # A value that does not fit such a column, or is none of its words (None: any), makes the record bad.
    strict: Mapping[str, tuple[str, ...] | None] = field(default_factory=dict)
    needed: frozenset[str] = frozenset()  # constants: the records of an input without a value there are bad
    may_widen: bool = True  # False: no column of the port ever gets a wider type
    keys: frozenset[str] = frozenset()  # columns by which sinks upsert rows of the port
    table_key: frozenset[str] = frozenset()  # those that a sink takes from a captured table, as its key was last known

    def to_json(self) -> dict[str, Json]:
        return {
            "schema": schema_to_json(self.decoded),
            "frozen": sorted(self.frozen),
            "constants": self.constants,
            "reserved": sorted(self.reserved),
            "kinds": self.kinds,
            "evolution": self.evolution,
            "infer_timestamps": self.infer_timestamps,
            "strict": {name: list(words) if words is not None else None for name, words in self.strict.items()},
            "needed": sorted(self.needed),
            "may_widen": self.may_widen,
            "keys": sorted(self.keys),
            "table_key": sorted(self.table_key),
        }

    @classmethod
    def from_json(cls, value: Mapping[str, Json]) -> Columns:
        return cls(
            decoded=schema_from_json(value["schema"]),
            frozen=frozenset(value["frozen"]),
            constants=dict(value["constants"]),
            reserved=frozenset(value["reserved"]),
            kinds=dict(value["kinds"]),
            evolution=value["evolution"],
            infer_timestamps=bool(value["infer_timestamps"]),
            strict={n: tuple(words) if words is not None else None for n, words in value.get("strict", {}).items()},
            needed=frozenset(value.get("needed", ())),
            may_widen=bool(value.get("may_widen", True)),
            keys=frozenset(value.get("keys", ())),
            table_key=frozenset(value.get("table_key", ())),
        )

    def find_refusal(self, constants: Mapping[str, str | None]) -> BadReason | None:
        """Return why all records of an input are bad: a constant lacks a value, or has one that does not fit."""
        for name, kind in self.constants.items():
            text = constants.get(name)
            is_null = constant_value(text, kind)[0].as_py() is None
            if is_null and text is not None and name in self.strict:
                return "does-not-fit"
            if is_null and name in self.needed:
                return "missing-required"
        return None


def constant_value(text: str | None, kind: str) -> pa.Array:
    """Return the value of a constant column as an array of one; null if the text does not fit the type."""
    wanted = schema_from_json([{"name": "x", "type": kind, "nullable": True}]).field(0).type
    try:
        return pa.array([text], pa.string()).cast(wanted)
    except (pa.ArrowInvalid, pa.ArrowNotImplementedError):
        return pa.nulls(1, wanted)


def declared(options: SourceOptions, port: str = MAIN_PORT) -> pa.Schema:
    """Return the columns that the spec declares for a port."""
    fields = options.schema_of(port).fields
    return schema_from_spec([{"name": f.name, "type": f.type, "nullable": f.nullable} for f in fields])


def columns_from_json(value: Mapping[str, Json]) -> dict[str, pa.Schema]:
    """Return the columns of the ports of sources from a checkpoint, by the names that sinks and operators use."""
    return {name: schema_from_json(columns) for name, columns in value.items()}


def agree(columns: Columns, splits: Sequence[ReadColumns]) -> tuple[Columns, set[int]]:
    """Choose the types of a port's new columns by the values of all splits; those with another type are read again.

    A choice is final: a split that is read again rescues the odd values, so they would no longer be counted. Fields
    inside a value that a split still holds as JSON text wait until that split has counted them, too.
    """
    counts: Counts = {}
    for split in splits:
        add_counts(counts, split.kinds)
    schemas = [split.schema for split in splits]
    texts = {path for schema in schemas for path in json_paths(schema)}
    choices = {
        path: choose(path, counted).kind
        for path, counted in counts.items()
        if path not in columns.kinds and texts.isdisjoint(outer_paths(path))
    }
    kinds = columns.kinds | {path: kind for path, kind in choices.items() if kind is not None}
    settled = kinds | {path: "json" for path, kind in choices.items() if kind is None}  # to be counted again
    merged = apply_kinds(columns.decoded, settled)
    for schema in schemas:
        merged = merge(merged, apply_kinds(schema, settled), frozen=columns.frozen)
    again = {number for number, schema in enumerate(schemas) if retyped(schema, merged)}
    return replace(columns, decoded=merged, kinds=kinds), again


def new_kinds(before: pa.Schema | None, after: pa.Schema) -> dict[str, str]:
    """Return the kinds of the fields that only `after` has, by path: what an epoch chose, for its replay."""
    known = kinds_of(before) if before is not None else {}
    return {path: kind for path, kind in kinds_of(after).items() if path not in known}


def find_wider(
    columns: Columns, declared_names: Collection[str], rescued: Iterable[Rescued], rows: int
) -> dict[str, pa.DataType]:
    """Return the known columns of a port that need a wider type for an epoch's numbers, with that type.

    As for a new column, one number in 1,000 may be odd: it is rescued. Declared columns keep their types.
    """
    found: dict[str, pa.DataType] = {}
    for one in rescued:
        index = columns.decoded.get_field_index(one.column)
        if index < 0 or one.column in declared_names or one.column not in columns.frozen:
            continue
        old = columns.decoded.field(index).type
        kind = pa.float64() if one.wider.get("float64", 0) * FEW_FRACTIONS > rows else pa.int64()
        if _needs_wider(one, rows) and is_wider(old, kind):
            found[one.column] = kind
    return found


def find_kept(
    columns: Columns, declared_names: Collection[str], rescued: Iterable[Rescued], rows: int
) -> dict[str, str]:
    """Return the known columns and nested fields whose numbers need a wider type that they cannot get, with the
    reason."""
    found: dict[str, str] = {}
    for one in rescued:
        index = columns.decoded.get_field_index(one.column)
        column = one.column if index >= 0 else one.column.split(".")[0]
        if column not in columns.frozen or not _needs_wider(one, rows):
            continue
        if column in declared_names:
            found[one.column] = IS_DECLARED
        elif index < 0 or pa.types.is_nested(columns.decoded.field(index).type):
            found[one.column] = "nested fields keep their types"
        elif pa.types.is_decimal(columns.decoded.field(index).type):
            found[one.column] = "decimal columns keep precision and scale"
    return found


def _needs_wider(rescued: Rescued, rows: int) -> bool:
    return sum(rescued.wider.values()) * FEW_FRACTIONS > rows


def retyped(old: pa.Schema, new: pa.Schema) -> bool:
    """Return whether a column of `old` has another type in `new`; new columns and new nested fields do not count."""
    return any(new.get_field_index(f.name) < 0 or _type_differs(f, new.field(f.name)) for f in old)


def _type_differs(old: pa.Field, new: pa.Field) -> bool:
    if pa.types.is_struct(old.type) and pa.types.is_struct(new.type):
        return retyped(pa.schema(list(_children(old.type))), pa.schema(list(_children(new.type))))
    if pa.types.is_list(old.type) and pa.types.is_list(new.type):
        return _type_differs(old.type.value_field, new.type.value_field)
    return bool(old.type != new.type) or is_json(old) != is_json(new)


def _children(kind: Any) -> Iterator[pa.Field]:
    return (kind.field(i) for i in range(kind.num_fields))
