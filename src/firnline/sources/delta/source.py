"""The Delta source in the driver: follows the true chain of a table's versions, and plans their files."""

from __future__ import annotations

import functools
import logging
import threading
from collections.abc import Mapping, Sequence
from dataclasses import replace

import pyarrow as pa
import pyarrow.parquet as pq

from firnline.errors import (
    ConfigError,
    SchemaError,
    SourceChangedError,
    SourceError,
    SourceMovedError,
    SourceUndoneError,
)
from firnline.sinks.delta.contents import find_key
from firnline.sinks.delta.upsert.rewrite import open_data_file
from firnline.sources.base import (
    MAIN_PORT,
    Backlog,
    Limits,
    PositionChange,
    PositionView,
    Sample,
    Source,
    SourcePlan,
    Split,
)
from firnline.sources.columns import Columns
from firnline.sources.delta import moves
from firnline.sources.delta.chain import Path, find_path
from firnline.sources.delta.options import DeltaSourceOptions
from firnline.sources.delta.planning import Item, Slice, deal, deal_again, settle, size_of
from firnline.sources.delta.position import DeltaPosition
from firnline.sources.delta.reader import DeltaReader, ReaderSettings
from firnline.sources.delta.table_log import TableLog
from firnline.sources.delta.versions import CHANGE_COLUMNS, Kind, Version, appended_files, changed_files
from firnline.sources.sample import sample_inputs
from firnline.storage import normalise
from firnline.topology.records import Marker
from firnline.types import Json

logger = logging.getLogger(__name__)

NAMED = 3  # examples in a message
POSITION = "position"  # of the first input record of an epoch: the position after it


class DeltaSource(Source):
    """The versions of a Delta table, as rows or as changes."""

    def __init__(self, options: DeltaSourceOptions, *, moved: tuple[str, str] | None) -> None:
        self.name = options.name
        self.poll_interval_secs = options.poll_interval_secs
        self._options = options
        self._root = normalise(options.table)
        self._moved = normalise(moved[0]) if moved else None
        self._log = TableLog(self._root, options.storage_options)
        self._turn = threading.RLock()  # `backlog` and `plan` come from different threads
        self._is_missing = False
        self._logged = -1  # the newest version whose change was logged as ignored

    @property
    def location(self) -> str:
        return self._root

    @property
    def _feeds(self) -> bool:
        return self._options.on_change == "change_feed"

    # -- positions ------------------------------------------------------------------------------------

    def start(self, position: Json | None) -> Json:
        if position is None:
            with self._turn:
                return self._begin().to_json()
        at = DeltaPosition.from_json(position)
        if at.table not in (self._root, self._moved):
            raise SourceMovedError(
                f"source {self.name!r}: the checkpoint was made on {at.table}, the spec says {self._root}",
                hint=f"If the same table moved, run once with --source-moved {at.table}={self._root}.",
            )
        return replace(at, table=self._root).to_json()

    def _begin(self) -> DeltaPosition:
        """Return the position of a first start."""
        start = self._options.start
        if isinstance(start, int):
            return DeltaPosition(self._root, version=start - 1, since=start - 1)
        at = DeltaPosition(self._root)
        newest = self._log.refresh_newest()
        if newest < 0:
            return at
        at = replace(at, id=self._log.table_id)
        if start == "now":
            return replace(at, version=newest, since=newest)
        if not self._log.snapshot(newest, origins=self._options.lineage):
            return replace(at, version=newest)
        return replace(at, reading=newest, snapshot=True)

    def describe(self, position: Json) -> PositionView:
        return DeltaPosition.from_json(position).describe()

    def set_position(self, position: Json, words: str) -> PositionChange:
        with self._turn:
            at, newest = self._stand(position)
            after = moves.parse(self.name, words, at, newest)
            if after is None:
                files = self._log.snapshot(newest, origins=self._options.lineage)
                whole = DeltaPosition(at.table, at.id, ignored=at.ignored, trail=at.trail)
                after = replace(whole, reading=newest, snapshot=True) if files else replace(whole, version=newest)
            return self._change(at, after, newest)

    def skip(self, position: Json, words: str) -> PositionChange:
        with self._turn:
            at, newest = self._stand(position)
            if not words.isdecimal() and words != "end":
                raise ConfigError(
                    f"source {self.name!r} cannot skip {words!r}",
                    hint="Write the number of a version: it is passed over with what is unread before it.",
                )
            after = moves.parse(self.name, words, at, newest)
            if after is None or after.version < at.reached or (at.version == after.version and not at.left):
                return PositionChange(position)
            return self._change(at, after, newest)

    def _stand(self, position: Json) -> tuple[DeltaPosition, int]:
        """Return the position on the table that is there now, and its newest version."""
        at, newest = DeltaPosition.from_json(position), self._log.refresh_newest()
        if newest < 0:
            raise SourceError(f"source {self.name!r}: there is no Delta table at {self._root}", table=self._root)
        if at.id not in (None, self._log.table_id):  # another table by now: nothing of it was read
            at = DeltaPosition(self._root)
        return replace(at, id=self._log.table_id), newest

    def _change(self, before: DeltaPosition, after: DeltaPosition, newest: int) -> PositionChange:
        if not self._feeds and self._find_undone(self._find_path(after.reached, newest), after.since):
            raise ConfigError(
                f"source {self.name!r}: version {after.reached} was undone, and its rows are no longer in the table",
                hint=f"Set a version that is part of the table's history; {newest} is the newest.",
            )
        gone = [n for n in self._find_path(after.reached, newest).ahead if n > after.since and not self._log.find(n)]
        if gone:
            raise ConfigError(
                f"source {self.name!r}: {_span('version', gone[0], gone[-1])} of {self._root} is no longer in the log",
                hint=f"Set version {gone[-1]} or a later one.",
            )
        return moves.compare(before, after, self._count_unread(before, newest), self._count_unread(after, newest))

    def _count_unread(self, at: DeltaPosition, newest: int) -> dict[int, int]:
        """Return how many files of each version a position has still to read; a version that is gone counts as one."""
        found: dict[int, int] = {}
        for item in at.left:
            found[int(item["version"])] = found.get(int(item["version"]), 0) + 1
        if at.reading is not None:
            files = self._files_of(at.reading, snapshot=at.snapshot, as_changes=at.changes)
            found[at.reading] = found.get(at.reading, 0) + len(files) - at.files
        for number in (number for number in self._find_path(at.reached, newest).ahead if number > at.since):
            version = self._log.find(number)
            if version is None:
                found[number] = 1
            elif self._feeds and version.changed:
                found[number] = version.changed
            elif version.has_rows:
                found[number] = version.files
        return found

    def check(self) -> None:
        with self._turn:
            if self._log.refresh_newest() < 0:
                raise SourceError(
                    f"source {self.name!r}: there is no Delta table at {self._root}",
                    hint="Correct `table`, or start the pipeline that writes the table; a run waits for it.",
                    table=self._root,
                )
            self._check_table()

    def unreachable(self) -> str | None:
        return f"there is no Delta table at {self._root}" if self._is_missing else None

    def _check_table(self) -> None:
        """Refuse a table that cannot be read right: once, and after every commit that changes what it is."""
        if self._log.is_checked:
            return
        self._log.check_features()
        if self._feeds:
            names = set(self._log.schema_at(self._log.newest).names) & set(CHANGE_COLUMNS)
            if names:
                raise SchemaError(
                    f"the table {self._root} has the columns {', '.join(sorted(names))}, which change rows need",
                    hint="Set on_change to fail or ignore.",
                )
        self._log.is_checked = True

    # -- planning -------------------------------------------------------------------------------------

    def plan(self, position: Json, limits: Limits) -> SourcePlan | None:
        with self._turn:
            at = DeltaPosition.from_json(position)
            newest = self._refresh(at)
            if newest < 0:
                return None
            self._check_table()
            chosen, after, in_order = self._choose(replace(at, id=self._log.table_id), newest, Slice(limits))
            markers = self._find_barriers(after.version, limits) if after.version > at.version else ()
            markers = (*markers, *chosen.passed)
            if not chosen.items and not markers and not self._must_pin(at):
                return None
            splits = deal(chosen.items, limits, self._find_row_groups, in_order=in_order)
            return SourcePlan(
                self.name,
                position,
                self._with_schemas(splits),
                files=sum(len(split.inputs) for split in splits),
                size_bytes=chosen.size_bytes,
                notes={"after": replace(after, left=tuple(chosen.left)).to_json()},
                markers=markers,
            )

    def _find_barriers(self, number: int, limits: Limits) -> tuple[Marker, ...]:
        """Return the markers of a version at which a slice ends."""
        version = self._log.find(number)
        return tuple(marker for marker in version.markers if limits.stops_at(marker)) if version is not None else ()

    def _must_pin(self, at: DeltaPosition) -> bool:
        """Return whether an epoch without rows must record where the pipeline begins: a later run has another `now`."""
        return self._options.start == "now" and at.id is not None and not at.trail

    def _refresh(self, at: DeltaPosition) -> int:
        """Read new versions; returns the newest one, or -1 if there is no table yet."""
        newest = self._log.refresh(at.reached, at.id)
        self._is_missing = newest < 0
        if newest < 0 and at.id is not None:
            raise SourceError(
                f"the table {self._root} is gone; version {at.reached} of it was read",
                hint="Put the table back: nothing was lost. A run tries again.",
                table=self._root,
            )
        return newest

    def _choose(self, at: DeltaPosition, newest: int, chosen: Slice) -> tuple[Slice, DeltaPosition, bool]:
        """Take parts of files into a slice.

        Returns it, the position after it, and whether its rows must be read in order.
        """
        for item in at.left:
            if not chosen.take(item):
                chosen.left.append(item)
        in_order = any("change" in item for item in chosen.items)
        if chosen.left or (self._feeds and chosen.items):
            return chosen, at, in_order
        versions, as_changes = self._find_unread(at, newest)
        began = at.version
        if at.reading is not None:
            files = self._files_of(at.reading, snapshot=at.snapshot, as_changes=at.changes)
            in_order = in_order or any("change" in item for item in files)
            at = self._take(chosen, at, at.reading, files[at.files :])
        for number in versions:
            if at.reading is not None or chosen.is_full:
                break
            if at.version > max(began, at.since) and self._find_barriers(at.version, chosen.limits):
                break
            if number <= at.since:
                at = replace(at, version=number)
                continue
            version = self._log.get(number)
            chosen.passed = tuple(marker for marker in version.passed if chosen.limits.stops_at(marker))
            if chosen.passed:
                break
            is_change = _is_change(version, as_changes=as_changes)
            if is_change and self._feeds:
                in_order = True
            elif is_change and self._options.on_change == "fail":
                if chosen.items:
                    break  # what comes before it is committed first
                raise self._changed(version)
            elif is_change:
                self._log_ignored(version)
                at = replace(at, ignored=at.ignored + 1)
            if not version.has_rows and not (is_change and self._feeds):
                at = replace(at, version=number)
                continue
            files = self._files_of(number, as_changes=is_change)
            at = self._take(chosen, replace(at, changes=is_change), number, files)
        return chosen, at, in_order

    def _take(self, chosen: Slice, at: DeltaPosition, number: int, files: Sequence[Item]) -> DeltaPosition:
        """Take the files of a version, from `at.files` on, as far as the limits allow."""
        taken = at.files
        for item in files:
            if not chosen.take(item):
                return replace(at, reading=number, files=taken)
            taken += 1
        return replace(at, version=number, reading=None, files=0, snapshot=False, changes=False)

    def _find_unread(self, at: DeltaPosition, newest: int) -> tuple[list[int], bool]:
        """Return the versions to read next, in order, and whether those that undo others are read as changes.

        Raises:
            SourceUndoneError: rows that were read are undone, and only a reader of changes may go on.
        """
        path = self._find_path(at.reached, newest)
        if not self._find_undone(path, at.since):
            return path.ahead, False
        if self._feeds:
            return list(range(at.reached + 1, newest + 1)), True
        raise self._undone(at, path, newest)

    def _find_path(self, reader: int, newest: int) -> Path:
        def parent(number: int) -> int:
            version = self._log.find(number)
            return version.parent if version is not None else number - 1

        return find_path(parent, reader, newest)

    def _find_undone(self, path: Path, since: int) -> list[int]:
        """Return the versions with rows that the reader has taken in and that are undone, newest first.

        A version that is no longer in the log may have had rows.
        """
        reads_changes = self._feeds
        found = []
        for number in (number for number in path.undone if number > since):
            version = self._log.find(number)
            if version is None or version.has_rows or (reads_changes and version.kind is not Kind.EMPTY):
                found.append(number)
        return found

    def _undone(self, at: DeltaPosition, path: Path, newest: int) -> SourceUndoneError:
        undone = self._find_undone(path, at.since)
        by = next((v for v in map(self._log.find, path.ahead) if v and v.kind in (Kind.UNDO, Kind.REPLACE)), None)
        versions = [version for number in undone if (version := self._log.find(number)) is not None]
        epochs = [version.epoch for version in versions if version.epoch is not None]
        written = ""
        if epochs:
            names = ", ".join(sorted({repr(version.pipeline) for version in versions if version.pipeline is not None}))
            written = f" ({_span('epoch', min(epochs), max(epochs))} of pipeline {names})"
        target = next((e for e, reached in reversed(at.trail) if self._is_on_chain(reached, newest, at.since)), None)
        own = [epoch for epoch, _ in at.trail if target is None or epoch > target]
        read_in = f" in {_span('epoch', own[0], own[-1])}" if own else ""
        way = (
            f"Take this pipeline back to before it read them: `firnline rollback --to {target}`, then run again."
            if target is not None
            else "No epoch that this pipeline remembers is older: restore a savepoint that is, or begin anew with "
            f"`firnline run --fresh-after {own[-1] if own else 'EPOCH'} --truncate`."
        )
        return SourceUndoneError(
            f"{_span('version', undone[-1], undone[0])} of {self._root}{written} was read{read_in}, and then undone"
            f"{f' by version {by.number} ({by.operation}, back to version {by.parent})' if by else ''}",
            hint=way + " Only a reader with on_change: change_feed takes the undoing as deletes.",
            table=self._root,
            versions=undone[::-1],
            upstream_epochs=sorted(set(epochs)),
            to_epoch=target,
        )

    def _is_on_chain(self, reached: int, newest: int, since: int) -> bool:
        return not self._find_undone(self._find_path(reached, newest), since)

    def _changed(self, version: Version) -> SourceChangedError:
        author = f" by epoch {version.epoch} of pipeline {version.pipeline!r}" if version.epoch is not None else ""
        return SourceChangedError(
            f"version {version.number} of {self._root} ({version.operation}{author}) changes or deletes rows",
            hint="Set on_change: ignore to pass over such commits, or on_change: change_feed to read changes as rows.",
            table=self._root,
            version=version.number,
        )

    def _log_ignored(self, version: Version) -> None:
        if version.number > self._logged:
            self._logged = version.number
            logger.warning(
                "commit ignored: it changes or deletes rows",
                extra={"source": self.name, "version": version.number, "operation": version.operation},
            )

    def _files_of(self, number: int, *, snapshot: bool = False, as_changes: bool = False) -> list[Item]:
        """Return the files of a version as inputs."""
        if snapshot:
            files = self._log.snapshot(number, origins=self._options.lineage)
            return [{**item, "change": "insert"} for item in files] if self._feeds else files
        version, actions = self._log.get(number), self._log.actions(number)
        if as_changes and self._feeds:
            return changed_files(self._root, version, actions)
        files = appended_files(self._root, version, actions)
        if self._feeds:
            return [{**item, "change": "insert", "stamp_ms": version.stamp_ms} for item in files]
        return files

    def _with_schemas(self, splits: list[Split]) -> list[Split]:
        """Name the columns of the table in each split where they change."""
        for split in splits:
            named: Json = None
            for item in split.inputs:
                columns = self._log.columns_at(int(item["version"])).to_json()
                if columns != named:
                    item["schema"] = named = columns
        return splits

    def _find_row_groups(self, item: Item) -> Sequence[int]:
        """Return the rows before each row group of a file; none if it cannot be opened: its reader says why."""
        return _row_groups(self._log, str(item["path"]))

    # -- after the job --------------------------------------------------------------------------------

    def advance(self, plan: SourcePlan, outcomes: Sequence[Json], epoch: int) -> tuple[Json, list[dict[str, Json]]]:
        after = DeltaPosition.from_json(plan.notes["after"])
        records, left = settle(plan.splits, outcomes)
        position = replace(after, left=(*left, *after.left)).with_epoch(epoch).to_json()
        if records:
            records[0][POSITION] = position
        return position, records

    def replay(self, position: Json, records: Sequence[dict[str, Json]]) -> Json:
        return next((record[POSITION] for record in reversed(records) if POSITION in record), position)

    def replan(self, position: Json, records: Sequence[dict[str, Json]], parallelism: int) -> SourcePlan:
        items: list[Item] = []
        schema: Json = None
        for number, record in enumerate(records):
            schema = record.get("schema", schema)
            dropped = (POSITION, "status", "schema")
            item = {key: value for key, value in record.items() if key not in dropped}
            items.append({**item, "part": number, "schema": schema})
        # Change rows may be of any number of splits here: all of them are of one epoch, and keep their order.
        splits = deal_again(items, parallelism)
        return SourcePlan(self.name, position, splits, len(items), sum(size_of(item) for item in items))

    def find_unavailable(
        self, position: Json, records: Sequence[Mapping[str, Json]], back_to: Json | None = None
    ) -> list[str]:
        with self._turn:
            at = DeltaPosition.from_json(position)
            newest = self._log.refresh_newest()
            if newest < 0:
                return [f"{self._root}: there is no such table"] if records else []
            undone = set(self._find_path(at.reached, newest).undone)
            needed = [record for record in records if int(record["version"]) not in undone]
            missing = [
                f"{record['path']} (version {record['version']}): vacuumed"
                for record in needed
                if find_key(self._log.storage, str(record["path"])) is None
            ]
            if back_to is not None:
                missing += self._find_cleaned(DeltaPosition.from_json(back_to), at)
            return missing

    def _find_cleaned(self, target: DeltaPosition, now: DeltaPosition) -> list[str]:
        """Return the versions between two positions that the log no longer has."""
        gone = [n for n in range(target.reached + 1, now.reached + 1) if self._log.find(n) is None]
        if target.snapshot:
            try:
                self._log.snapshot(target.reached, origins=self._options.lineage)
            except SourceError as error:
                return [error.message]
        return [f"{self._root}: versions {gone[0]} to {gone[-1]} are no longer in the log"] if gone else []

    def backlog(self, position: Json) -> Backlog:
        with self._turn:
            at = DeltaPosition.from_json(position)
            newest = self._refresh(at)
            if newest < 0:
                return Backlog(0, 0)
            files, size = len(at.left), sum(size_of(item) for item in at.left)
            if at.reading is not None:
                rest = self._files_of(at.reading, snapshot=at.snapshot, as_changes=at.changes)[at.files :]
                files, size = files + len(rest), size + sum(size_of(item) for item in rest)
            numbers, as_changes = self._find_unread(at, newest)
            for version in (self._log.get(number) for number in numbers if number > at.since):
                if self._feeds and _is_change(version, as_changes=as_changes):
                    files, size = files + version.changed, size + version.size_bytes
                elif version.has_rows:
                    files, size = files + version.files, size + version.size_bytes
            return Backlog(files, size)

    # -- reading --------------------------------------------------------------------------------------

    def reader_settings(self) -> dict[str, Json]:
        return ReaderSettings(
            root=self._root,
            storage_options=dict(self._options.storage_options),
            on_bad_record=self._options.on_bad_record,
            lineage=self._options.lineage,
        ).to_json()

    def sample(self, plan: SourcePlan, columns: Mapping[str, Columns]) -> Sample | None:
        settings = self.reader_settings()
        schema: Json = None
        for split in plan.splits:  # a sample reads inputs one by one
            for item in split.inputs:
                schema = item["schema"] = item.get("schema", schema)
        return sample_inputs(lambda split: DeltaReader(settings, split, columns), plan, columns[MAIN_PORT])


def _is_change(version: Version, *, as_changes: bool) -> bool:
    """Return whether a version changes rows; with `as_changes`, one that undoes others does."""
    return version.kind is Kind.CHANGE or (as_changes and version.kind in (Kind.UNDO, Kind.REPLACE))


def _span(word: str, first: int, last: int) -> str:
    return f"{word} {first}" if first == last else f"{word}s {first} to {last}"


@functools.lru_cache(maxsize=1024)
def _row_groups(log: TableLog, path: str) -> tuple[int, ...]:
    try:
        found = find_key(log.storage, path)
        if found is None:
            return ()
        with open_data_file(log.storage, *found) as file:
            metadata = pq.ParquetFile(file).metadata
            sizes = [metadata.row_group(number).num_rows for number in range(metadata.num_row_groups)]
    except (OSError, pa.ArrowException):
        return ()
    return tuple(sum(sizes[:number]) for number in range(len(sizes)))
