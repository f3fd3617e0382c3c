"""Compares the columns that files have with the columns that a table has."""

from __future__ import annotations

import pyarrow as pa

from firnline.errors import SchemaError


def missing_fields(table: pa.Schema, wanted: pa.Schema) -> list[pa.Field]:
    """Columns, or columns with nested fields, that must be added before files with `wanted` can be read.

    Raises:
        SchemaError: a column exists with another type.
    """
    found = []
    for field in wanted:
        index = table.get_field_index(field.name)
        if index < 0 or not _fits(table.field(index).type, field.type, field.name):
            found.append(field.with_nullable(True))
    return found


def _fits(table: pa.DataType, wanted: pa.DataType, path: str) -> bool:
    """Whether the table's type holds every nested field of the wanted one; SchemaError when the types differ."""
    if pa.types.is_struct(table) and pa.types.is_struct(wanted):
        held = {table.field(i).name: table.field(i).type for i in range(table.num_fields)}
        children = [wanted.field(i) for i in range(wanted.num_fields)]
        results = [c.name in held and _fits(held[c.name], c.type, f"{path}.{c.name}") for c in children]
        return all(results)
    if _is_list(table) and _is_list(wanted):
        return _fits(table.value_type, wanted.value_type, f"{path}[]")
    if pa.types.is_map(table) and pa.types.is_map(wanted):
        return _fits(table.item_type, wanted.item_type, f"{path}{{}}")
    if _plain(table) != _plain(wanted):
        raise SchemaError(f"column {path} is {table} in the table, but {wanted} in the data", column=path)
    return True


def _is_list(kind: pa.DataType) -> bool:
    return bool(pa.types.is_list(kind) or pa.types.is_large_list(kind))


def _plain(kind: pa.DataType) -> str:
    """A type without the differences that only memory layout makes."""
    if pa.types.is_large_string(kind) or pa.types.is_string_view(kind):
        return "string"
    if pa.types.is_large_binary(kind) or pa.types.is_binary_view(kind):
        return "binary"
    return str(kind)
