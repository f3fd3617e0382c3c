"""The formats of files: each opens a file at a recorded place and decodes its records.

Modules are imported on demand: a worker that reads lines loads no reader of Parquet.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from firnline.errors import DamagedError
from firnline.types import Json

if TYPE_CHECKING:
    from firnline.sources.files.formats.base import Format

NDJSON: dict[str, Json] = {"format": "ndjson"}  # how a file was read whose record in the ledger does not say


def open_format(read_as: Mapping[str, Json] | None) -> Format[Any]:
    """Return the format that a record of the ledger or of a plan names, with its options."""
    read_as = read_as or NDJSON
    name = read_as.get("format")
    if name == "ndjson":
        from firnline.sources.files.formats.lines import NdjsonFormat

        return NdjsonFormat()
    if name == "json":
        from firnline.sources.files.formats.json_values import JsonFormat

        return JsonFormat()
    if name == "csv":
        from firnline.sources.files.formats.csv_records import CsvFormat

        return CsvFormat(read_as)
    if name == "parquet":
        from firnline.sources.files.formats.parquet import ParquetFormat

        return ParquetFormat()
    raise DamagedError(f"a file was read in the format {name!r}, which this version does not know")
