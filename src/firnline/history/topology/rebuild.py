"""Builds the table of a channel anew, for a savepoint of a topology: one commit per distinct position of a reader, and
one for the cut. The positions become versions of the new table."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field, replace

import pyarrow as pa
from deltalake import DeltaTable

from firnline.errors import RollbackRefusedError
from firnline.sinks.delta.contents import ListedFile, list_contents
from firnline.sources.delta.chain import find_path
from firnline.sources.delta.position import DeltaPosition
from firnline.sources.delta.table_log import TableLog
from firnline.sources.delta.versions import Kind
from firnline.types import Json

_HINT = "Let the readers catch up (firnline topology show), and take another snapshot."


@dataclass(frozen=True, slots=True)
class NewCommit:
    """One commit of the new table: the files that it adds, as the old log names them."""

    files: tuple[ListedFile, ...]
    versions: tuple[int, ...]  # of the old table, that it stands for


@dataclass(frozen=True, slots=True)
class Rebuilding:
    """How a table is built anew. `versions` has, for each version of the old table that matters, the new one."""

    commits: list[NewCommit] = field(default_factory=list)
    versions: dict[int, int] = field(default_factory=dict)

    @property
    def version(self) -> int:
        """The newest version of the new table; 0 is the empty table."""
        return len(self.commits)


def group_versions(
    base: int, ahead: Sequence[int], boundaries: Collection[int], files_of: Callable[[int], Sequence[ListedFile]]
) -> Rebuilding:
    """Return the commits that stand for some versions of a chain. Pure.

    `files_of(base)` are all files of the version that the new table begins with (-1: none); those of a later version
    are the ones that it adds. A commit ends at every boundary and at the last version. A group without files becomes
    no commit: its versions are the one before.
    """
    commits: list[NewCommit] = []
    versions: dict[int, int] = {}
    files, grouped = list(files_of(base)) if base >= 0 else [], [base]
    for number in (base, *ahead):
        if number != base:
            files += files_of(number)
            grouped.append(number)
        if number in {base, *boundaries, *ahead[-1:]}:
            if files:
                commits.append(NewCommit(tuple(files), tuple(grouped)))
            versions |= dict.fromkeys(grouped, len(commits))
            files, grouped = [], []
    return Rebuilding(commits, versions)


class ChannelTable:
    """The table of one channel's sink, up to the version of the cut, with the positions of its readers there."""

    def __init__(self, log: TableLog, open_at: Callable[[int], DeltaTable], version: int) -> None:
        self._log = log
        self._open_at = open_at
        self._version = version

    def plan(self, positions: Sequence[tuple[str, Json]]) -> Rebuilding:
        """Plan the new table for the positions of its readers, each with the reader's name; one may have several.

        Raises:
            RollbackRefusedError: a position cannot be given in the new table; it names the reader.
        """
        boundaries: set[int] = set()
        for reader, position in positions:
            boundaries |= self._find_boundaries(reader, DeltaPosition.from_json(position))
        base = min(boundaries, default=self._version)
        ahead = find_path(self._parent, base, self._version).ahead
        changed = [n for n in ahead if (found := self._log.find(n)) is not None and found.kind is Kind.CHANGE]
        if changed:
            names = ", ".join(dict.fromkeys(reader for reader, _ in positions))
            raise RollbackRefusedError(
                f"version {changed[0]} of {self._log.root} changes or deletes rows, and {names} has yet to read it",
                hint=_HINT,
            )
        for number in [n for n in boundaries if n in ahead]:  # a version that is read in part is a commit of its own
            index = ahead.index(number)
            boundaries |= set(ahead[index - 1 : index])
        return group_versions(base, ahead, boundaries, lambda number: self._files_of(number, base))

    def translate(self, reader: str, position: Json, made: Rebuilding, table: str, table_id: str, epoch: int) -> Json:
        """Return a position as one of the new table, for a reader at one of its epochs.

        Raises:
            RollbackRefusedError: it names a part of a file that the new table has not.
        """
        at = DeltaPosition.from_json(position)
        by_file = {file.path: number for number, commit in enumerate(made.commits, start=1) for file in commit.files}
        left: list[dict[str, Json]] = []
        for item in at.left:
            if str(item["path"]) not in by_file:
                raise RollbackRefusedError(f"{reader} has read {item['path']} in part, which is gone", hint=_HINT)
            left.append({**item, "version": by_file[str(item["path"])]})
        is_whole = at.snapshot and at.reading is not None
        moved = replace(
            at,
            table=table,
            id=table_id,
            version=-1 if is_whole else made.versions[self._effective(at.version)],
            reading=None if at.reading is None else made.versions[self._effective(at.reading)],
            since=-1,
            left=tuple(left),
            trail=(),
        )
        return moved.with_epoch(epoch).to_json()

    def _find_boundaries(self, reader: str, at: DeltaPosition) -> set[int]:
        if at.snapshot and at.reading is not None:
            if at.files or at.left:
                raise RollbackRefusedError(
                    f"{reader} is in the midst of its first read of {self._log.root}", hint=_HINT
                )
            return {self._effective(at.reading)}
        found = {self._effective(at.version)}
        if at.reading is not None:
            found.add(self._effective(at.reading))
        return found

    def _effective(self, number: int) -> int:
        """Return the version on the chain of the cut up to which a reader has read: it may have passed empty ones."""
        path = find_path(self._parent, number, self._version)
        return self._parent(path.ahead[0]) if path.ahead else self._version

    def _files_of(self, number: int, base: int) -> list[ListedFile]:
        if number == base:
            return list(list_contents(self._open_at(number)))
        if not self._log.get(number).has_rows:
            return []
        adds = (action["add"] for action in self._log.actions(number) if "add" in action)
        return [
            ListedFile(str(a["path"]), int(a["size"]), None, dict(a["partitionValues"]), int(a["modificationTime"]))
            for a in adds
            if a.get("dataChange", True)
        ]

    def count_rows(self) -> int | None:
        """Return the rows of the table at the cut; None if the log does not say it."""
        counts = pa.table(self._open_at(self._version).get_add_actions()).column("num_records").to_pylist()
        return None if None in counts else sum(counts)

    def _parent(self, number: int) -> int:
        found = self._log.find(number)
        return found.parent if found is not None else number - 1
