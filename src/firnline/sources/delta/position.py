"""The position of a Delta source: a version of the table, and what is left to read up to it. Pure."""

from __future__ import annotations

from dataclasses import dataclass, replace

from firnline.errors import DamagedError
from firnline.sources.base import PositionView
from firnline.types import Json

TRAIL = 64  # own epochs that a position remembers, to name the one to go back to


@dataclass(frozen=True, slots=True)
class DeltaPosition:
    """The position of a Delta source.

    Attributes:
        table: the location.
        id: Delta's id of the table; None before the table exists.
        version: every version up to this one is read, apart from `left`.
        reading: a later version that is read in part.
        files: the number of files of `reading` that are read, apart from `left`.
        changes: `reading` is read as changes, also if it undoes others.
        snapshot: `reading` stands for all rows that the table had in that version, not for one commit.
        since: versions up to this one were never to be read.
        left: parts of files that were planned and not read.
        ignored: commits that changed rows and were passed over.
        trail: the newest own epochs, each with the version that it reached.
    """

    table: str
    id: str | None = None
    version: int = -1
    reading: int | None = None
    files: int = 0
    changes: bool = False
    snapshot: bool = False
    since: int = -1
    left: tuple[dict[str, Json], ...] = ()
    ignored: int = 0
    trail: tuple[tuple[int, int], ...] = ()

    @property
    def reached(self) -> int:
        """The newest version of which rows may have been read."""
        return self.version if self.reading is None else self.reading

    def with_epoch(self, epoch: int) -> DeltaPosition:
        """Return the position with an epoch that ended here."""
        return replace(self, trail=(*self.trail, (epoch, self.reached))[-TRAIL:])

    def to_json(self) -> dict[str, Json]:
        """Return the position in the form of the checkpoint."""
        return {
            "table": self.table,
            "table_id": self.id,
            "version": self.version,
            **({"reading": self.reading, "files": self.files} if self.reading is not None else {}),
            **({"changes": True} if self.changes else {}),
            **({"snapshot": True} if self.snapshot else {}),
            **({"since": self.since} if self.since >= 0 else {}),
            **({"left": list(self.left)} if self.left else {}),
            **({"ignored": self.ignored} if self.ignored else {}),
            **({"trail": [list(one) for one in self.trail]} if self.trail else {}),
        }

    @classmethod
    def from_json(cls, value: Json) -> DeltaPosition:
        """Parse the output of `to_json`. Raises DamagedError if it is not one."""
        try:
            reading = value.get("reading")
            return cls(
                table=str(value["table"]),
                id=value["table_id"],
                version=int(value["version"]),
                reading=None if reading is None else int(reading),
                files=int(value.get("files", 0)),
                changes=bool(value.get("changes", False)),
                snapshot=bool(value.get("snapshot", False)),
                since=int(value.get("since", -1)),
                left=tuple(dict(item) for item in value.get("left", ())),
                ignored=int(value.get("ignored", 0)),
                trail=tuple((int(epoch), int(version)) for epoch, version in value.get("trail", ())),
            )
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise DamagedError(f"a position of a Delta table is unreadable: {error}") from error

    def describe(self) -> PositionView:
        """Return the position in a form for people."""
        part: dict[str, Json] = {}
        if self.reading is not None:
            part = {"reading_version": self.reading, "files_read": self.files}
        return PositionView(
            facts={
                "table": self.table,
                "table_id": self.id,
                "version": self.version,
                **part,
                **({"parts_left": len(self.left)} if self.left else {}),
                **({"commits_ignored": self.ignored} if self.ignored else {}),
            },
            location=self.table,
        )
