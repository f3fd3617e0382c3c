"""A place in the log of one PostgreSQL server, as positions hold it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from firnline.errors import DamagedError
from firnline.sources.postgres.messages import format_lsn, parse_lsn
from firnline.types import Json


@dataclass(frozen=True, slots=True)
class LastTransaction:
    """The last transaction before a place: the server must send it again, unchanged, when reading goes on there."""

    commit_lsn: int
    end_lsn: int
    xid: int
    committed_at: int  # microseconds since 1970


@dataclass(frozen=True, slots=True)
class LogPlace:
    """A place between two transactions. What ends at or before `lsn` has been read."""

    lsn: int
    system: str = ""  # identifier of the server's data; empty before the first connection
    timeline: int = 0
    last: LastTransaction | None = None
    seen_at: int = 0  # when the log ended here, microseconds since 1970; 0: the place is the end of `last`
    is_chosen: bool = False  # a person chose it: the log before may hold changes that were never read
    # By which publication, and for which tables (patterns), the log was read up to here; empty: not known.
    publication: str = ""
    tables: tuple[str, ...] = ()

    @property
    def reached_at(self) -> int:
        """Everything that was committed before this time is read; microseconds since 1970, 0 if unknown."""
        return max(self.seen_at, self.last.committed_at if self.last is not None else 0)

    def to_json(self) -> dict[str, Json]:
        found: dict[str, Json] = {"lsn": format_lsn(self.lsn), "system": self.system, "timeline": self.timeline}
        if self.seen_at:
            found["seen_at"] = self.seen_at
        if self.is_chosen:
            found["is_chosen"] = True
        if self.publication:
            found |= {"publication": self.publication, "tables": list(self.tables)}
        if self.last is not None:
            found["last"] = {
                "commit_lsn": format_lsn(self.last.commit_lsn),
                "end_lsn": format_lsn(self.last.end_lsn),
                "xid": self.last.xid,
                "committed_at": self.last.committed_at,
            }
        return found

    @classmethod
    def from_json(cls, value: Json) -> LogPlace:
        """Read a place.

        Raises:
            DamagedError: it is none.
        """
        if not isinstance(value, Mapping) or not {"lsn", "system", "timeline"} <= value.keys():
            raise DamagedError("the position is not one in the log of PostgreSQL")
        try:
            last = value.get("last")
            return cls(
                parse_lsn(str(value["lsn"])),
                str(value["system"]),
                int(value["timeline"]),
                LastTransaction(
                    parse_lsn(str(last["commit_lsn"])),
                    parse_lsn(str(last["end_lsn"])),
                    int(last["xid"]),
                    int(last["committed_at"]),
                )
                if last is not None
                else None,
                int(value.get("seen_at", 0)),
                bool(value.get("is_chosen", False)),
                str(value.get("publication", "")),
                tuple(map(str, value.get("tables", ()))),
            )
        except (KeyError, TypeError, ValueError) as error:
            raise DamagedError(f"the position in the log of PostgreSQL cannot be read: {error}") from error


def describe_place(place: Json) -> dict[str, Json]:
    """Return a place for people."""
    if place is None:
        return {}
    found = LogPlace.from_json(place)
    return {"lsn": format_lsn(found.lsn), **({"xid": found.last.xid} if found.last is not None else {})}
