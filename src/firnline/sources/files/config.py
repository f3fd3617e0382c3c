"""The keys of a file source in a spec."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import ClassVar, Literal, TypeAlias

from pydantic import Field, ValidationInfo, field_validator, model_validator

from firnline.config.fields import (
    Config,
    Count,
    Endpoint,
    Flag,
    Location,
    ReadSecret,
    Seconds,
    SecondsOrZero,
    Secret,
    Size,
    fail,
)
from firnline.options import SourceOptions
from firnline.sources.config import SourceConfig
from firnline.sources.files.options import CsvOptions, FileSourceOptions
from firnline.storage import is_remote

LOCAL_MIN_AGE_SECONDS = 2.0
_TIME_WITHOUT_ZONE = re.compile(r"\d{4}-\d\d-\d\d[Tt ]\d\d:\d\d(:\d\d(\.\d+)?)?")


def default_min_age(path: str) -> float:
    """Return the age at which a file counts as whole: on an object store it appears whole."""
    return 0.0 if is_remote(path) else LOCAL_MIN_AGE_SECONDS


Encoding: TypeAlias = Literal["utf-8", "utf-16", "latin-1", "windows-1252"]


class CsvConfig(Config):
    """How a file source reads CSV."""

    delimiter: str = Field(default=",", description='The character between two fields, such as ";" or "\\t".')
    header: Flag = Field(
        default=True,
        description="Whether the first record has the names of the columns. Without a header, fields get the names of "
        "schema.fields in their order, and then column0, column1 and so on by their place.",
    )
    check_header: Flag = Field(
        default=True,
        description="Whether a file is set aside if its first line looks like a record and not like a header.",
    )
    quote: str = Field(
        default='"', description="The character around fields that hold delimiters or line breaks; empty for none."
    )
    null_values: tuple[str, ...] = Field(default=("",), description="Fields that are null, quoted or not.")
    encoding: Encoding = Field(default="utf-8", description="utf-8, utf-16, latin-1 or windows-1252.")

    @field_validator("delimiter", "quote")
    @classmethod
    def _one_character(cls, value: str, info: ValidationInfo) -> str:
        if value == "" and info.field_name == "quote":
            return value
        if len(value) != 1 or not value.isascii() or value in "\r\n\0":
            raise fail(f"{value!r} is not one ASCII character")
        return value

    @model_validator(mode="after")
    def _characters_differ(self) -> CsvConfig:
        if self.delimiter == self.quote:
            raise fail("delimiter and quote are the same character")
        return self

    def build(self) -> CsvOptions:
        """Return the options."""
        return CsvOptions(self.delimiter, self.header, self.quote, self.null_values, self.encoding, self.check_header)


class FilesSourceConfig(SourceConfig):
    """A file source: reads files in byte order of their names."""

    other_words: ClassVar[dict[str, str]] = {"uri": "path", "url": "path", "folder": "path", "table": "path"}
    options_class = FileSourceOptions

    type: Literal["files"] = Field(default="files", description="Kind of source.")
    path: Location = Field(
        description="Folder, glob or URI (s3://, gs://, az://, abfs://, file://) of the input; relative to this file."
    )
    format: Literal["ndjson", "json", "csv", "parquet"] = Field(
        default="ndjson",
        description="ndjson: one JSON object per line; json: an array of objects, or objects over many lines; csv; "
        "parquet. Compression of text by suffix: .gz, .zst or none.",
    )
    csv: CsvConfig = Field(default=CsvConfig(), description="How to read CSV.")
    poll_interval_secs: Seconds = Field(default=10, description="Seconds between two listings for new files.")
    reconcile_interval_secs: Seconds | Literal["auto"] = Field(
        default="auto",
        description="Seconds between two comparisons of a full listing with the ledger, which find late files. auto: "
        "at every poll while the listing is cheap, otherwise less often, at least every hour. --once always makes one.",
    )
    min_age_secs: SecondsOrZero | None = Field(
        default=None,
        description="A file that changed less than this many seconds ago is not read yet: it may be half written. "
        "Default: 2 on local disk, 0 on object stores, where a file appears whole.",
    )
    start_after: str | None = Field(
        default=None, min_length=1, description="Begin after this file name, or at this time (RFC 3339, with a zone)."
    )
    late_files: Literal["ingest", "ignore", "fail"] = Field(
        default="ingest",
        description="A late file, one whose name sorts before files already read: ingest reads it, ignore skips it, "
        "fail stops the run.",
    )
    on_growth: Literal["report", "read_rest", "fail"] = Field(
        default="report",
        description="A file that grew after it was read: report names it in status, files and a metric; read_rest also "
        "reads what was appended, if the file is plain NDJSON; fail stops the run.",
    )
    file_attempts: Count = Field(default=3, description="Attempts before a broken file is set aside.")
    max_record_bytes: Size = Field(default=16 * 1024 * 1024, description="A longer line is a bad record.")
    storage_options: dict[str, Secret] = Field(
        default={}, description="Credentials and endpoints of the store; values may be ${env:NAME} or ${file:path}."
    )

    @field_validator("start_after")
    @classmethod
    def _time_has_a_zone(cls, value: str | None) -> str | None:
        if value is not None and _TIME_WITHOUT_ZONE.fullmatch(value):
            raise fail(f'the time "{value}" has no zone (write {value.replace(" ", "T")}Z for UTC)')
        return value

    def build(self, name: str, read_secret: ReadSecret) -> SourceOptions:
        if self.min_age_secs is None:
            return self.model_copy(update={"min_age_secs": default_min_age(self.path)}).build(name, read_secret)
        options = super().build(name, read_secret)
        assert isinstance(options, FileSourceOptions)
        return replace(options, csv=self.csv.build())

    @property
    def endpoint(self) -> Endpoint:
        return Endpoint("path", self.path)
