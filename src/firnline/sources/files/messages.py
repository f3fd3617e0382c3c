"""The messages between the driver and a reader of files, in plain JSON."""

from __future__ import annotations

from dataclasses import dataclass

from firnline.types import Json


@dataclass(frozen=True, slots=True)
class FileReaderSettings:
    """The settings that a reader of files needs beside its split."""

    root: str
    storage_options: dict[str, str]
    max_record_bytes: int
    on_bad_record: str  # quarantine or fail

    def to_json(self) -> dict[str, Json]:
        return {
            "root": self.root,
            "storage_options": self.storage_options,
            "max_record_bytes": self.max_record_bytes,
            "on_bad_record": self.on_bad_record,
        }

    @classmethod
    def from_json(cls, value: dict[str, Json]) -> FileReaderSettings:
        return cls(**value)


@dataclass(frozen=True, slots=True)
class FileOutcome:
    """Where reading ended or, with `failed`, why the file cannot be read."""

    path: str
    to: int = 0  # records read, those of earlier epochs included
    offset: int = 0  # plain files: the byte after the last record read
    line: int = 0  # lines before that byte
    finished: bool = False
    failed: str | None = None
    end: dict[str, Json] | None = None  # of a plain file: a `growth.FileEnd`

    def to_json(self) -> dict[str, Json]:
        if self.failed is not None:
            return {"path": self.path, "failed": self.failed}
        return {
            "path": self.path,
            "to": self.to,
            "offset": self.offset,
            "line": self.line,
            "finished": self.finished,
            **({"end": self.end} if self.end is not None else {}),
        }

    @classmethod
    def from_json(cls, value: Json) -> FileOutcome:
        return cls(**value)
