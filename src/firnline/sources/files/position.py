"""The position of a file source: a high-water mark and the few files in progress. Pure.

The mark, `last_committed_file`, passes no file that is not finished, except late files in progress, files that are too
young to be read and files set aside, all of which are named here; an entry in `files` overrides the mark. The size of a
position therefore depends on the files in progress, not on all files ever read.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field, replace

from firnline.errors import DamagedError
from firnline.sources.base import PositionView
from firnline.types import Json

FINISHED = "Finished"
TOO_YOUNG = "it changed too recently to be read"


@dataclass(frozen=True, slots=True)
class Progress:
    """The progress in one file. A record is a non-blank line, including bad ones."""

    records: int = 0
    finished: bool = False
    offset: int = 0  # plain files: the byte after the last record read
    line: int = 0  # lines before that byte
    size_bytes: int = 0
    etag: str = ""
    attempts: int = 0  # tries in a row that failed
    reason: str = ""  # of the last failed try
    read_as: dict[str, Json] = field(default_factory=dict)  # its format, if a part was read; empty: NDJSON
    reread: bool = False  # it was finished before, and is read again from its beginning
    tail: str = ""  # plain files: length and checksum of the bytes before `offset`, see `growth`

    @property
    def is_too_young(self) -> bool:
        """Whether the file waits to be old enough: the mark may pass it, since it is named here."""
        return self.reason == TOO_YOUNG and not self.attempts and not self.finished

    def to_json(self) -> Json:
        """Return the interchange form: `{"RecordsRead": n}` or `"Finished"`."""
        return FINISHED if self.finished else {"RecordsRead": self.records}

    def details(self) -> dict[str, Json]:
        """Return the details that the interchange form cannot hold."""
        details = {
            "offset": self.offset,
            "line": self.line,
            "size_bytes": self.size_bytes,
            "etag": self.etag,
            "attempts": self.attempts,
            "reason": self.reason,
            "read_as": self.read_as,
            "tail": self.tail,
            "reread": self.reread,
        }
        return {key: value for key, value in details.items() if value}

    @classmethod
    def from_json(cls, value: Json, details: Json) -> Progress:
        if value == FINISHED:
            return cls(finished=True)
        try:
            return cls(records=int(value["RecordsRead"]), **(details or {}))
        except (KeyError, TypeError, ValueError) as error:
            raise DamagedError(f"a file's progress is unreadable: {value!r}") from error


@dataclass(frozen=True, slots=True)
class SetAside:
    """A file that cannot be read now, with the records already read of it."""

    reason: str
    records: int = 0
    offset: int = 0
    line: int = 0
    size_bytes: int = 0
    etag: str = ""
    epoch: int = 0
    read_as: dict[str, Json] = field(default_factory=dict)
    tail: str = ""
    reread: bool = False  # it was finished before, and was to be read again

    def to_json(self) -> dict[str, Json]:
        return {
            "reason": self.reason,
            "records": self.records,
            "offset": self.offset,
            "line": self.line,
            "size_bytes": self.size_bytes,
            "etag": self.etag,
            "epoch": self.epoch,
            **({"read_as": self.read_as} if self.read_as else {}),
            **({"tail": self.tail} if self.tail else {}),
            **({"reread": True} if self.reread else {}),
        }


@dataclass(frozen=True, slots=True)
class FileState:
    """The position of a file source."""

    root: str
    mark: str | None = None
    files: dict[str, Progress] = field(default_factory=dict)
    set_aside: dict[str, SetAside] = field(default_factory=dict)
    start_after: str | None = None
    answered: tuple[str, ...] = ()  # requests that were answered and may not be deleted yet
    former_roots: tuple[str, ...] = ()  # where the same files lay before: the ledger has names of that time

    def to_json(self) -> dict[str, Json]:
        """Return the position in the form of the checkpoint."""
        details = {path: progress.details() for path, progress in self.files.items()}
        return {
            "root": self.root,
            **self.interchange(),
            "details": {path: found for path, found in details.items() if found},
            "set_aside": {path: item.to_json() for path, item in sorted(self.set_aside.items())},
            "start_after": self.start_after,
            **({"answered": list(self.answered)} if self.answered else {}),
            **({"former_roots": list(self.former_roots)} if self.former_roots else {}),
        }

    def interchange(self) -> dict[str, Json]:
        """Return the `source_state` of the other tool's format."""
        files = {path: progress.to_json() for path, progress in sorted(self.files.items())}
        return {"files": files, "last_committed_file": self.mark}

    @classmethod
    def from_json(cls, value: Json) -> FileState:
        try:
            details = value.get("details", {})
            return cls(
                root=str(value["root"]),
                mark=value["last_committed_file"],
                files={p: Progress.from_json(v, details.get(p)) for p, v in value["files"].items()},
                set_aside={p: SetAside(**v) for p, v in value.get("set_aside", {}).items()},
                start_after=value.get("start_after"),
                answered=tuple(value.get("answered", ())),
                former_roots=tuple(value.get("former_roots", ())),
            )
        except (KeyError, TypeError, AttributeError) as error:
            raise DamagedError(f"a file position is unreadable: {error}") from error

    @classmethod
    def from_interchange(cls, value: Json, root: str) -> FileState:
        """Return a position from another tool's log; names may be full, `file://` URIs, or relative to the root."""
        try:
            files = {full_name(p, root): Progress.from_json(v, None) for p, v in value["files"].items()}
            mark = value["last_committed_file"]
        except (KeyError, TypeError, AttributeError) as error:
            raise DamagedError(f"a source state is unreadable: {error}") from error
        return cls(root=root, mark=full_name(mark, root) if mark else None, files=files).prune_finished()

    def describe(self) -> PositionView:
        """Return the position in a form for people."""
        in_progress = {
            path: progress.records
            for path, progress in sorted(self.files.items())
            if not progress.finished and not progress.is_too_young
        }
        return PositionView(
            facts={
                "root": self.root,
                "last_committed_file": self.mark,
                "files_in_progress": len(in_progress),
                "files_set_aside": len(self.set_aside),
            },
            location=self.root,
            by_input=True,
            last=self.mark,
            in_progress=in_progress,
            set_aside={path: item.reason for path, item in self.set_aside.items()},
            named=len(self.files),
        )

    def knows(self, path: str) -> bool:
        """Return whether a listed file needs no new plan: passed by the mark, finished, or set aside."""
        progress = self.files.get(path)
        if progress is not None:
            return progress.finished
        return path in self.set_aside or not self.is_after_mark(path)

    def is_after_mark(self, path: str) -> bool:
        return self.mark is None or path.encode() > self.mark.encode()

    def prune_finished(self) -> FileState:
        """Move the mark up to the last file before which everything is finished; drop what it passes."""
        mark = self.mark
        files = dict(self.files)
        for path in sorted(self.files, key=str.encode):
            after = mark is None or path.encode() > mark.encode()
            if files[path].finished:
                if after:
                    mark = path
                del files[path]
            elif after and not files[path].is_too_young:
                break
        return replace(self, mark=mark, files=files)

    def moved(self, old: str, new: str) -> FileState:
        """Return the same position on another root."""

        def move(path: str) -> str:
            return _move(path, old, new)

        return replace(
            self,
            root=new,
            former_roots=(*self.former_roots, old),
            mark=move(self.mark) if self.mark else None,
            files={move(p): v for p, v in self.files.items()},
            set_aside={move(p): v for p, v in self.set_aside.items()},
            start_after=move(self.start_after) if self.start_after else None,
        )

    def current_name(self, path: str) -> str:
        """Return the current name of a file that the ledger has under a former root."""
        return current_name(path, self.former_roots, self.root)


def current_name(path: str, former_roots: Iterable[str], root: str) -> str:
    """Return the current name of a file that lay under a former root."""
    for old in former_roots:
        path = _move(path, old, root)
    return path


def _move(path: str, old: str, new: str) -> str:
    return new + path[len(old) :] if path.startswith(old + "/") else path


def full_name(path: str, root: str) -> str:
    """Return the full name of a file: `s3://bucket/key`, or the absolute path."""
    if path.startswith("file://"):
        return path.removeprefix("file://")
    if "://" in path or path.startswith("/"):
        return path
    return f"{root}/{path}"
