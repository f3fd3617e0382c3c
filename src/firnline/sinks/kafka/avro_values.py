"""Values as Avro records with the id of their schema, which is registered before the first of them is sent."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from firnline.avro import Schema, UnsupportedSchemaError, derive_schema, encode_rows, parse_schema
from firnline.errors import SchemaError, SinkError
from firnline.schema_registry import PREFIX_BYTES, RefusedSchemaError, RegistryError, SchemaRegistry
from firnline.types import Json

_TOPIC = "{topic}"  # in a subject


class AvroValues:
    """Encodes rows of one sink as Avro.

    Args:
        sink: The name of the sink, for messages.
        registry: Where schemas are registered.
        shape: The kind's settings of an epoch.
        is_topic: Whether a rendered name may be a topic of this sink: no other gets a subject.
    """

    def __init__(
        self, sink: str, registry: SchemaRegistry, shape: Mapping[str, Json], is_topic: Callable[[str], bool]
    ) -> None:
        self._sink = sink
        self._registry = registry
        self._subject = str(shape["subject"])
        self._record = str(shape["record_name"])
        self._is_topic = is_topic
        self._schemas: dict[pa.Schema, tuple[str, Schema]] = {}

    def encode(self, batch: pa.RecordBatch, topic: str, topics: pa.Array | None) -> tuple[pa.Array, dict[str, str]]:
        """Return the values of rows, and why topics refuse them. `topics` are those of the rows, if they differ.

        Raises:
            SinkError: the registry does not answer.
            SchemaError: the columns have no names in Avro.
        """
        if not batch.num_rows:
            return pa.array([], pa.large_binary()), {}
        text, schema = self._schema(batch.schema)
        names = [topic] if topics is None else topics.dictionary.to_pylist()
        found = [self._register(name, text) if self._is_topic(name) else 0 for name in names]
        refused = {name: one for name, one in zip(names, found, strict=True) if isinstance(one, str)}
        ids = np.array([0 if isinstance(one, str) else one for one in found], np.int64)
        data, offsets = encode_rows(schema, batch, PREFIX_BYTES)
        codes: Any = 0 if topics is None else pc.fill_null(topics.indices, 0).to_numpy(zero_copy_only=False)
        for byte in range(1, PREFIX_BYTES):
            data[offsets[:-1] + byte] = (ids[codes] >> 8 * (PREFIX_BYTES - 1 - byte)) & 0xFF
        buffers = [None, pa.py_buffer(offsets), pa.py_buffer(data)]
        return pa.Array.from_buffers(pa.large_binary(), batch.num_rows, buffers), refused

    def _schema(self, columns: pa.Schema) -> tuple[str, Schema]:
        known = self._schemas.get(columns)
        if known is None:
            try:
                derived = derive_schema(columns, self._record)
                known = json.dumps(derived, separators=(",", ":")), parse_schema(derived)
            except UnsupportedSchemaError as error:
                raise SchemaError(f"sink {self._sink!r}: {error}", hint="Rename or exclude a column.") from error
            self._schemas[columns] = known
        return known

    def _register(self, topic: str, schema: str) -> int | str:
        """Return the id of a schema in the subject of a topic, or why the registry refuses it."""
        try:
            return self._registry.register(self._subject.replace(_TOPIC, topic), schema)
        except RefusedSchemaError as error:
            return str(error)
        except RegistryError as error:
            raise SinkError(f"sink {self._sink!r}: {error}", hint=error.hint, sink=self._sink) from error
