"""The options of a file source."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import ClassVar, Literal

from firnline.options import MEBIBYTE, SourceOptions
from firnline.types import Json

_NUMBERS = ("int", "float", "decimal")


@dataclass(frozen=True, slots=True)
class CsvOptions:
    """How a file source reads CSV."""

    delimiter: str = ","
    header: bool = True  # the first record has the names of the columns
    quote: str = '"'  # empty: no field is quoted
    null_values: tuple[str, ...] = ("",)  # fields that are null, quoted or not
    encoding: str = "utf-8"
    check_header: bool = True  # refuse a file whose first line looks like a record

    def to_json(self) -> dict[str, Json]:
        """Return what differs from the defaults."""
        default = CsvOptions()
        values = {
            "delimiter": self.delimiter,
            "header": self.header,
            "quote": self.quote,
            "null_values": list(self.null_values),
            "encoding": self.encoding,
            "check_header": self.check_header,
        }
        return {key: value for key, value in values.items() if value != _plain(getattr(default, key))}

    @classmethod
    def from_json(cls, value: Mapping[str, Json]) -> CsvOptions:
        """Parse the output of `to_json`."""
        known = {
            key: value[key] for key in ("delimiter", "header", "quote", "encoding", "check_header") if key in value
        }
        if "null_values" in value:
            known["null_values"] = tuple(value["null_values"])
        return cls(**known)


def _plain(value: Json) -> Json:
    return list(value) if isinstance(value, tuple) else value


@dataclass(frozen=True, slots=True)
class FileSourceOptions(SourceOptions):
    """A file source: reads files in byte order of their names."""

    type: ClassVar[str] = "files"

    path: str  # absolute folder, glob or URI
    format: Literal["ndjson", "json", "csv", "parquet"] = "ndjson"
    csv: CsvOptions = CsvOptions()
    reconcile_interval_secs: float | Literal["auto"] = "auto"
    min_age_secs: float = 0  # a younger file is not planned yet; the spec's default is 2 on local disk
    start_after: str | None = None  # a file name, or an RFC 3339 time
    late_files: Literal["ingest", "ignore", "fail"] = "ingest"
    on_growth: Literal["report", "read_rest", "fail"] = "report"
    file_attempts: int = 3
    max_record_bytes: int = 16 * MEBIBYTE
    storage_options: Mapping[str, str] = field(default_factory=dict, repr=False)

    @property
    def location(self) -> str:
        return self.path

    @property
    def read_as(self) -> dict[str, Json]:
        """The format and its options, as plans and the ledger record them for every file; empty for NDJSON."""
        if self.format == "ndjson":
            return {}
        if self.format != "csv":
            return {"format": self.format}
        fields = self.schema.fields
        declared = {
            "names": [] if self.csv.header else [field.name for field in fields],
            "numbers": [field.name for field in fields if field.type.startswith(_NUMBERS)],
            "booleans": [field.name for field in fields if field.type.startswith("bool")],
        }
        return {"format": "csv", **self.csv.to_json(), **{key: names for key, names in declared.items() if names}}


def file_sources(sources: Iterable[SourceOptions]) -> tuple[FileSourceOptions, ...]:
    """Return the file sources among the sources of a pipeline, for commands that work on files only."""
    return tuple(source for source in sources if isinstance(source, FileSourceOptions))
