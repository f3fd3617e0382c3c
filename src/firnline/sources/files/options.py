"""The options of a file source."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import ClassVar, Literal

from firnline.options import MEBIBYTE, SourceOptions


@dataclass(frozen=True, slots=True)
class FileSourceOptions(SourceOptions):
    """A file source: reads files in byte order of their names."""

    type: ClassVar[str] = "files"

    path: str  # absolute folder, glob or URI
    format: Literal["ndjson"] = "ndjson"
    reconcile_interval_secs: float | Literal["auto"] = "auto"
    min_age_secs: float = 0  # a younger file is not planned yet; the spec's default is 2 on local disk
    start_after: str | None = None  # a file name, or an RFC 3339 time
    late_files: Literal["ingest", "ignore", "fail"] = "ingest"
    file_attempts: int = 3
    max_record_bytes: int = 16 * MEBIBYTE
    storage_options: Mapping[str, str] = field(default_factory=dict)

    @property
    def location(self) -> str:
        return self.path


def file_sources(sources: Iterable[SourceOptions]) -> tuple[FileSourceOptions, ...]:
    """Return the file sources among the sources of a pipeline, for commands that work on files only."""
    return tuple(source for source in sources if isinstance(source, FileSourceOptions))
