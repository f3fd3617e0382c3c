"""The headers of CSV files whose bad records are in quarantine: in the metadata of a file of the quarantine."""

from __future__ import annotations

import base64
import json
from collections.abc import Mapping

import pyarrow as pa

from firnline.names import HEADERS_KEY


def add_headers(schema: pa.Schema, headers: Mapping[str, bytes]) -> pa.Schema:
    """Return the schema of a file of the quarantine with the headers of its records, by input."""
    if not headers:
        return schema
    texts = {path: base64.b64encode(header).decode() for path, header in headers.items()}
    return schema.with_metadata({HEADERS_KEY: json.dumps(texts)})


def find_headers(schema: pa.Schema) -> dict[str, bytes]:
    """Return the headers by input; empty if the records need none, or if an older version quarantined them."""
    texts = json.loads((schema.metadata or {}).get(HEADERS_KEY.encode(), b"{}"))
    return {path: base64.b64decode(text) for path, text in texts.items()}
