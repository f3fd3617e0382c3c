"""Avro: parses schemas (`schema`), and decodes and encodes binary records, compiled, as Arrow columns."""

from firnline.avro.decode import decode_records
from firnline.avro.encode import encode_rows
from firnline.avro.schema import Schema, UnsupportedSchemaError, derive_schema, parse_schema

__all__ = [
    "Schema",
    "UnsupportedSchemaError",
    "decode_records",
    "derive_schema",
    "encode_rows",
    "parse_schema",
]
