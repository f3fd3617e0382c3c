"""Compares the two ends of a channel: is a reader's position at or before an epoch of the writer, on the true chain?"""

from __future__ import annotations

from collections.abc import Iterable

from firnline.errors import ConfigError, SourceError
from firnline.history.topology.graph import Channel, Topology
from firnline.options import PipelineOptions
from firnline.sinks.delta.contents import find_key
from firnline.sources.delta.chain import find_path
from firnline.sources.delta.options import DeltaSourceOptions
from firnline.sources.delta.position import DeltaPosition
from firnline.sources.delta.table_log import TableLog
from firnline.sources.delta.versions import Kind
from firnline.storage import normalise
from firnline.types import Json


def check_channels(topology: Topology) -> None:
    """Refuse a topology that cannot be taken to one instant.

    Raises:
        ConfigError: a table has several writers, or a channel is of a kind that has no markers.
    """
    if topology.conflicts:
        raise ConfigError(
            "; ".join(map(str, topology.conflicts)),
            hint="A channel has one writer: give each a table of its own.",
        )
    for channel in topology.channels:
        if channel.kind == "kafka":
            raise ConfigError(
                f"{channel.reader!r} reads the topic {channel.place}, which {channel.writer!r} writes: a snapshot "
                "covers Delta channels only",
                hint="Chain them by a Delta table, or leave one of them out of the topology.",
            )
        if channel.part:
            raise ConfigError(
                f"{channel.reader!r} reads {channel.place}, a part of the sink {channel.sink!r} of {channel.writer!r}: "
                "a snapshot covers whole tables only",
                hint="Write the table with a sink of its own, or leave one of them out of the topology.",
            )


class TableChain:
    """The versions of one channel's table, as its reader sees them."""

    def __init__(self, reader: PipelineOptions, source: str) -> None:
        options = next(one for one in reader.sources if one.name == source)
        assert isinstance(options, DeltaSourceOptions)
        self._feeds = options.on_change == "change_feed"
        self._log = TableLog(normalise(options.table), options.storage_options)
        self._log.refresh_newest()

    def fits(self, position: Json, version: int) -> bool:
        """Return whether nothing that a position has read lies beyond a version, or is undone on the way to it."""
        at = DeltaPosition.from_json(position)
        if at.id is not None and at.id != self._log.table_id:
            return False
        for number in self._path_back(at.reached, version):
            found = self._log.find(number) if number > at.since else None
            if number > at.since and (found is None or found.kind is not Kind.EMPTY):
                return False
        return True

    def files_between(self, position: Json, version: int) -> list[str]:
        """Return the data files of the commits that a position has still to read, up to a version."""
        at = DeltaPosition.from_json(position)
        found: list[str] = [str(item["path"]) for item in at.left]
        first = at.version if at.reading is None else at.reading - 1
        if at.snapshot and at.reading is not None:
            found += (str(item["path"]) for item in self._log.snapshot(at.reading, origins=False))
            first = at.reading
        kinds = (*_NAMES, "remove") if self._feeds else _NAMES
        for number in find_path(self._parent, first, version).ahead:
            for action in self._log.actions(number):
                files = (action[kind] for kind in kinds if kind in action)
                found += (str(file["path"]) for file in files if file.get("dataChange", True) or "cdc" in action)
        return found

    def find_missing(self, position: Json, version: int) -> list[str]:
        """Return what a position has still to read, up to a version, and is gone: data files, versions of the log."""
        try:
            return [path for path in self.files_between(position, version) if find_key(self._log.storage, path) is None]
        except SourceError as error:
            return [error.message]

    def _path_back(self, reader: int, version: int) -> Iterable[int]:
        return find_path(self._parent, reader, version).undone

    def _parent(self, number: int) -> int:
        found = self._log.find(number)
        return found.parent if found is not None else number - 1


_NAMES = ("add", "cdc")


def reached_version(position: Json) -> int:
    """Return the version up to which a position has read everything: it needs all later ones."""
    at = DeltaPosition.from_json(position)
    if at.snapshot and at.reading is not None:
        return at.reading  # it reads what the table had in that version
    return min([at.version, *(int(item["version"]) - 1 for item in at.left)])


def channels_from(topology: Topology, writer: str, sink: str) -> list[Channel]:
    """Return the channels that one sink feeds."""
    return [channel for channel in topology.channels if (channel.writer, channel.sink) == (writer, sink)]
