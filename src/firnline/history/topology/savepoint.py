"""Savepoints of a topology: a completed snapshot, copied to another place, from which a new topology can start.

The folder has a savepoint with copies for each member. A table that is a channel is built anew there: one commit per
distinct position of its readers, and one for the cut. Of a topic that is a channel, the records are copied that its
readers have yet to read. `topology.json`, written last, has the positions in the new tables, and those in topics as
they were. After a kill the same command begins anew; until `topology.json` is there, the folder is no savepoint.

A new topology has the members of the old one, with tables and topics of their own. Its start copies each channel's
table as it is and writes each channel's records to its topic, then restores each member's savepoint with the positions
in these. The same command finishes a killed start.
"""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace

import pyarrow as pa
from deltalake import DeltaTable

from firnline.checkpoint.codec import canonical, parse, seal, unseal
from firnline.checkpoint.ledger import LedgerEntry
from firnline.committer.validate import InvalidUnitError
from firnline.errors import ConfigError, DamagedError, FirnlineError, RollbackRefusedError, SourceMovedError
from firnline.faults import fault_point
from firnline.history.edits.restore import Restored, is_restored, restore_savepoint
from firnline.history.edits.restore_plan import read_stats
from firnline.history.savepoints.catalog import load_savepoint
from firnline.history.savepoints.create import FOLDS, check_apart, is_temporary
from firnline.history.savepoints.files import Progress, copy_file, each, sha256_of
from firnline.history.savepoints.format import SavedBytes, SavedFile, SavedSink, Savepoint
from firnline.history.savepoints.state import copy_state, take_state
from firnline.history.topology.channels import channels_from, check_channels, find_position, find_topics
from firnline.history.topology.graph import Channel, Topology
from firnline.history.topology.rebuild import ChannelTable
from firnline.history.topology.restore import find_snapshot_epochs
from firnline.history.topology.snapshot import Snapshots
from firnline.history.topology.topic_copy import TopicCopy
from firnline.history.topology.topic_files import SavedTopic
from firnline.history.topology.topic_fill import TopicFill
from firnline.history.topology.topic_plan import TopicMove, translate
from firnline.names import (
    DELTA_LOG,
    JOURNAL,
    SAVED_DATA,
    SAVEPOINT,
    STATE,
    TOPOLOGY_BEGUN,
    TOPOLOGY_SAVEPOINT,
    quarantine_folder,
    saved_data_key,
    saved_ledger_key,
    saved_quarantine_key,
    topology_copy,
)
from firnline.options import template_columns
from firnline.process import this_process
from firnline.run.open_pipeline import OpenPipeline, open_pipeline
from firnline.schema import schema_to_json
from firnline.sinks.delta.contents import ListedFile, find_key, list_contents, special_features
from firnline.sinks.delta.options import DeltaSinkOptions
from firnline.sinks.delta.sink import DeltaSink, as_delta
from firnline.sinks.delta.table import Table
from firnline.sinks.kafka.options import KafkaSinkOptions
from firnline.sinks.kafka.sink import KafkaSink
from firnline.sources.delta.table_log import TableLog
from firnline.sources.kafka.position import PartitionState
from firnline.sources.kafka.position import Position as KafkaPosition
from firnline.state.home import StateHome
from firnline.storage import Storage, normalise, open_storage
from firnline.types import EntryRef, Json


@dataclass(frozen=True, slots=True)
class SavedTopology:
    """The manifest of a topology's savepoint."""

    topology: str
    snapshot: str
    created_at: str
    members: dict[str, int]  # the epoch of each
    tables: dict[str, list[SavedBytes]]  # the log of each channel's table, by "member/sink"
    positions: dict[str, dict[str, Json]]  # by reader and source: in the new tables; of topics, as they were
    topics: dict[str, SavedTopic] = field(default_factory=dict)  # the range of each channel's topic, by "member/sink"

    def to_bytes(self) -> bytes:
        """Return the durable form."""
        body = {
            "topology": self.topology,
            "snapshot": self.snapshot,
            "created_at": self.created_at,
            "members": self.members,
            "tables": {
                name: [{"name": f.name, "size_bytes": f.size_bytes, "sha256": f.sha256} for f in files]
                for name, files in self.tables.items()
            },
            "positions": self.positions,
            **({"topics": {name: topic.to_json() for name, topic in self.topics.items()}} if self.topics else {}),
        }
        return canonical(seal(body)) + b"\n"

    @classmethod
    def from_bytes(cls, data: bytes, what: str) -> SavedTopology:
        """Parse the durable form. Raises DamagedError."""
        body = unseal(parse(data, what), what)
        try:
            return cls(
                topology=str(body["topology"]),
                snapshot=str(body["snapshot"]),
                created_at=str(body["created_at"]),
                members={str(name): int(epoch) for name, epoch in body["members"].items()},
                tables={
                    str(name): [SavedBytes(str(f["name"]), int(f["size_bytes"]), str(f["sha256"])) for f in files]
                    for name, files in body["tables"].items()
                },
                positions={str(name): dict(sources) for name, sources in body["positions"].items()},
                topics={str(n): SavedTopic.from_json(one, what) for n, one in body.get("topics", {}).items()},
            )
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise DamagedError(f"{what} lacks {error}", what=what) from error


def load_topology_savepoint(storage: Storage) -> SavedTopology:
    """Read the manifest of a topology's savepoint. Raises ConfigError if there is none."""
    try:
        return SavedTopology.from_bytes(storage.get(TOPOLOGY_SAVEPOINT), f"{TOPOLOGY_SAVEPOINT} in {storage.root}")
    except FileNotFoundError as error:
        raise ConfigError(
            f"{storage.root} is no savepoint of a topology, or was not completed: it has no {TOPOLOGY_SAVEPOINT}",
            hint="Check the path; a savepoint that was interrupted is completed by the command that began it.",
        ) from error


# -- create -------------------------------------------------------------------------------------------


def create_topology_savepoint(
    snapshots: Snapshots,
    words: str,
    path: str,
    *,
    storage_options: dict[str, str] | None = None,
    progress: Progress | None = None,
    stopping: Callable[[], bool] = lambda: False,
) -> SavedTopology:
    """Copy a completed snapshot to a folder or URI that does not exist yet, or that a killed one has begun.

    Raises:
        ConfigError: the snapshot cannot be restored, a channel has a template, or the folder is in other use.
        RollbackRefusedError: a reader's position cannot be given in a new table, or files or records are gone.
    """
    snapshot, epochs = find_snapshot_epochs(snapshots, words)
    check_copied(snapshots.topology)
    place = normalise(path)
    storage = open_storage(place, storage_options)
    done = _begin(snapshots, storage, snapshot)
    if done is not None:
        return done
    making = _Making(snapshots, place, storage_options or {}, progress, stopping)
    saved = making.make(snapshot, epochs)
    fault_point("topology.savepoint.before")
    storage.put(TOPOLOGY_SAVEPOINT, saved.to_bytes())
    fault_point("topology.savepoint.after")
    return saved


def copy_all(snapshots: Snapshots, storage_options: dict[str, str], say: Callable[[str], None]) -> list[str]:
    """Copy the completed snapshots that have no copy into the home: the newest, and those of commands that were killed.

    Returns those that cannot be copied. One that cannot stands in the way of no other.
    """
    failed = []
    for one in reversed(snapshots.find_complete()):
        place = f"{snapshots.home.root}/{topology_copy(snapshots.home.name, one)}"
        try:
            create_topology_savepoint(snapshots, one, place, storage_options=storage_options)
        except FirnlineError as error:
            failed.append(one)
            say(f"alarm: {one} has no copy: {error.message}{f'. {error.hint}' if error.hint else ''}")
        else:
            say(f"the copy of {one} is {place}")
    return failed


def check_copied(topology: Topology) -> None:
    """Refuse a topology with a channel that cannot be copied. Raises ConfigError."""
    check_channels(topology)
    for channel in topology.channels:
        is_topics = channel.kind == "kafka" and bool(template_columns(_kafka_sink(topology, channel).topic))
        if channel.part or is_topics:
            raise ConfigError(
                f"{channel.reader!r} reads {channel.place}, which sink {channel.sink!r} of {channel.writer!r} writes "
                "with a template: a savepoint of a topology copies only tables and topics with a name of their own",
                hint="Leave one of the two pipelines out of the topology; snapshots go without `copy: true`.",
            )


def _kafka_sink(topology: Topology, channel: Channel) -> KafkaSinkOptions:
    options = next(one for one in topology.members[channel.writer].sinks if one.name == channel.sink)
    assert isinstance(options, KafkaSinkOptions)
    return options


def _begin(snapshots: Snapshots, storage: Storage, snapshot: str) -> SavedTopology | None:
    """Take the folder: it is empty, or a killed command began the same savepoint there. Returns it if it is done."""
    with contextlib.suppress(FileNotFoundError):
        found = SavedTopology.from_bytes(storage.get(TOPOLOGY_SAVEPOINT), TOPOLOGY_SAVEPOINT)
        if found.snapshot == snapshot:
            return found
    for name, pipeline in snapshots.opened.items():
        check_apart(pipeline, f"{storage.root}/{name}")
    body = {"snapshot": snapshot, "topology": snapshots.home.name}
    names = [one.name.removeprefix(f"{storage.root}/") for one in storage.list("") if not is_temporary(one.name)]
    try:
        begun = unseal(parse(storage.get(TOPOLOGY_BEGUN), TOPOLOGY_BEGUN), TOPOLOGY_BEGUN)
    except FileNotFoundError:
        begun = None
    if names and (begun is None or any(begun.get(key) != value for key, value in body.items())):
        raise ConfigError(f"{storage.root} is not empty", hint="Name a folder that does not exist yet.")
    storage.put(TOPOLOGY_BEGUN, canonical(seal(body)))
    for name in names:  # of a killed command
        if name.split("/", 1)[0] in snapshots.opened:
            storage.delete(name)
    return None


@dataclass(frozen=True, slots=True)
class _Record:
    """The epoch of one member."""

    pipeline: OpenPipeline
    entry: LedgerEntry
    ref: EntryRef


class _Making:
    def __init__(
        self,
        snapshots: Snapshots,
        place: str,
        storage_options: dict[str, str],
        progress: Progress | None,
        stopping: Callable[[], bool],
    ) -> None:
        self._snapshots = snapshots
        self._topology = snapshots.topology
        self._place = place
        self._options = storage_options
        self._progress = progress
        self._stopping = stopping
        self._logs: dict[str, list[SavedBytes]] = {}
        self._positions: dict[str, dict[str, Json]] = {}
        self._topics: dict[str, SavedTopic] = {}
        self._records: dict[str, _Record] = {}

    def make(self, snapshot: str, epochs: Mapping[str, int]) -> SavedTopology:
        self._records = {name: self._find_record(name, epoch) for name, epoch in epochs.items()}
        for name, record in self._records.items():
            self._save_member(name, record)
            for sink in find_topics(self._topology, record.pipeline):
                self._save_topic(sink, snapshot, record)
        now, home = record.pipeline.clock.now().isoformat(), self._snapshots.home.name
        return SavedTopology(home, snapshot, now, dict(epochs), self._logs, self._positions, self._topics)

    def _find_record(self, name: str, epoch: int) -> _Record:
        pipeline = self._snapshots.opened[name]
        head = pipeline.deciding.load_committed()
        for entry, ref in pipeline.ledger.entries(head.entry):
            if entry.epoch == epoch:
                return _Record(pipeline, entry, ref)
        raise RollbackRefusedError(f"{name} has no epoch {epoch} any more", hint="Take another snapshot.")

    def _save_member(self, name: str, record: _Record) -> None:
        pipeline = record.pipeline
        root = f"{self._place}/{name}"
        storage = open_storage(root, self._options)
        head = replace(
            pipeline.deciding.load_committed(),
            epoch=record.entry.epoch,
            entry=record.ref,
            checkpoint=record.entry.checkpoint,
        )
        taken = take_state(pipeline, head)
        if taken.replayed:
            raise RollbackRefusedError(
                f"{name} has no snapshot of its state at epoch {record.entry.epoch}", hint="Take another snapshot."
            )
        sinks = {sink.name: self._save_table(name, as_delta(sink), record, storage) for sink in pipeline.tables}
        state = copy_state(taken, storage, StateHome(f"{root}/{STATE}", self._options), self._progress, self._stopping)
        me = this_process()
        saved = Savepoint(
            id=pipeline.ids.new(),
            pipeline=name,
            created_at=pipeline.clock.now().isoformat(),
            by={"user": me.user, "host": me.host, "run": ""},
            epoch=record.entry.epoch,
            checkpoint=record.entry.checkpoint,
            entry=record.ref,
            copied=True,
            sinks=sinks,
            ledger=self._save_ledger(record, storage),
            quarantine=self._save_quarantine(record, storage),
            state=taken.states,
            state_files=state,
            state_home=pipeline.state_home.storage.root if state else "",
        )
        fault_point("savepoint.put.before")
        storage.put(SAVEPOINT, saved.to_bytes())
        fault_point("savepoint.put.after")

    # -- tables ---------------------------------------------------------------------------------------

    def _save_table(self, name: str, sink: DeltaSink, record: _Record, target: Storage) -> SavedSink:
        sink.load_committed()  # `version_of` reads the version of the handle
        version = sink.table.version if sink.name == JOURNAL else sink.version_of(record.entry.epoch)
        delta = sink.table.at(version)
        special = special_features(delta)
        if special:
            raise ConfigError(
                f"{sink.table.uri} uses {', '.join(special)}, under which its files are not all there is",
                hint="Rewrite the table without them first.",
            )
        saved = SavedSink(
            table=sink.table.uri,
            table_id=str(delta.metadata().id),
            version=version,
            schema=schema_to_json(_schema_of(delta)),
            partition_by=list(delta.metadata().partition_columns),
            files=[],
        )
        channels = [one for one in self._topology.channels if (one.writer, one.sink) == (name, sink.name)]
        if channels:
            return self._build(sink, channels, saved, target)
        listed = [] if sink.name == JOURNAL else list(list_contents(delta))
        return replace(saved, files=[file for file, _ in self._copy(sink, listed, target)])

    def _copy(
        self, sink: DeltaSink, files: list[ListedFile], target: Storage
    ) -> list[tuple[SavedFile, dict[str, Json]]]:
        """Copy data files. Returns each as the manifest names it, and as a commit adds it."""

        def copy(file: ListedFile) -> tuple[SavedFile, dict[str, Json]]:
            there = find_key(sink.storage, file.path)
            if there is None or there[1] != file.size_bytes:
                raise RollbackRefusedError(
                    f"{sink.name}: {file.path} is gone or was changed: another tool has cleaned the table up",
                    hint="Take another snapshot.",
                )
            key = saved_data_key(sink.name, there[0])
            fault_point("savepoint.copy.before")
            size, sha256 = copy_file(sink.storage, there[0], target, key)
            fault_point("savepoint.copy.after")
            try:
                rows, stats = read_stats(target, key, size)
            except InvalidUnitError as error:
                raise DamagedError(f"{sink.name}: {file.path} cannot be saved: {error}") from error
            saved = SavedFile(there[0], size, rows, file.partition_values, file.modification_time, sha256)
            add = {
                "path": saved.path,
                "size_bytes": size,
                "rows": rows,
                "partition_values": file.partition_values,
                "modification_time": file.modification_time,
                "stats": stats,
            }
            return saved, add

        what = f"copying {sink.name}"
        return each(what, files, copy, lambda f: f.size_bytes, self._progress, self._stopping)

    def _build(self, sink: DeltaSink, channels: list[Channel], saved: SavedSink, target: Storage) -> SavedSink:
        """Build the table of a channel anew, and translate its readers' positions."""
        log = TableLog(sink.table.uri, sink.table.storage_options or {})
        log.refresh_newest()
        table = ChannelTable(log, sink.table.at, saved.version)
        at = {channel: self._position(channel) for channel in channels}
        made = table.plan([(channel.reader, position) for channel, position in at.items()])
        files: list[SavedFile] = []
        adds: list[list[dict[str, Json]]] = []
        for commit in made.commits:
            copied = self._copy(sink, list(commit.files), target)
            files += (file for file, _ in copied)
            adds.append([add for _, add in copied])
        wanted, rows = table.count_rows(), sum(file.rows or 0 for file in files)
        if wanted is not None and rows != wanted:
            raise RollbackRefusedError(
                f"{sink.table.uri} has {wanted} rows at version {saved.version}, its parts have {rows}",
                hint="Let the readers catch up (firnline topology show), and take another snapshot.",
            )
        root = f"{target.root}/{SAVED_DATA}/{sink.name}"
        new = self._commit(root, sink, saved, adds)
        writer = channels[0].writer
        self._logs[f"{writer}/{sink.name}"] = [
            _read_bytes(target, f"{SAVED_DATA}/{sink.name}/{DELTA_LOG}", stat.name.rsplit("/", 1)[-1])
            for stat in target.list(f"{SAVED_DATA}/{sink.name}/{DELTA_LOG}")
            if not is_temporary(stat.name)
        ]
        for channel, position in at.items():
            epoch = self._records[channel.reader].entry.epoch
            moved = table.translate(channel.reader, position, made, "", new, epoch)
            self._positions.setdefault(channel.reader, {})[channel.source] = moved
        return replace(saved, table_id=new, version=made.version, files=files)

    def _position(self, channel: Channel) -> Json:
        position = find_position(self._records[channel.reader].entry, channel)
        if position is None:
            raise RollbackRefusedError(
                f"{channel.reader} had no source {channel.source!r} at the snapshot",
                hint="Run it once with that source, and take another snapshot.",
            )
        return position

    def _commit(self, root: str, sink: DeltaSink, saved: SavedSink, adds: list[list[dict[str, Json]]]) -> str:
        """Write the log of a new table. Returns its id."""
        delta = sink.table.at(saved.version)
        table = Table(root, self._options)
        info = canonical({"kind": "savepoint", "pipeline": "", "table": saved.table, "version": saved.version}).decode()
        table.create(_schema_of(delta), saved.partition_by, info, {}, dict(delta.metadata().configuration))
        for files in adds:
            table.append("delta.commit", files, info, {}, {}, onto=table.version)
            table.refresh()
        return str(table.delta.metadata().id)

    # -- topics ---------------------------------------------------------------------------------------

    def _save_topic(self, sink: KafkaSink, snapshot: str, record: _Record) -> None:
        """Copy what the readers of a topic have yet to read."""
        name = record.pipeline.options.name
        positions = {channel: self._position(channel) for channel in channels_from(self._topology, name, sink.name)}
        target = open_storage(f"{self._place}/{name}", self._options)
        copy = TopicCopy(self._topology, list(positions), sink, positions)
        self._topics[f"{name}/{sink.name}"] = copy.save(
            snapshot, record.entry.epoch, target, record.pipeline.clock, self._progress, self._stopping
        )
        for channel, position in positions.items():
            self._positions.setdefault(channel.reader, {})[channel.source] = position

    # -- the rest -------------------------------------------------------------------------------------

    def _save_ledger(self, record: _Record, target: Storage) -> list[SavedBytes]:
        """Copy the chain of an epoch. A run may fold entries meanwhile: then the chain is read again."""
        ledger, storage = record.pipeline.ledger, record.pipeline.storage
        for _ in range(FOLDS):
            texts: dict[str, bytes] = {}
            try:
                for name in ledger.chain_names(record.ref):
                    texts[name] = storage.get(f"{ledger.folder}/{name}")
            except FileNotFoundError:
                continue
            return [_put(target, saved_ledger_key(name), name, data) for name, data in texts.items()]
        raise RollbackRefusedError("the ledger changed during every attempt to copy it", hint="Try again.")

    def _save_quarantine(self, record: _Record, target: Storage) -> list[SavedBytes]:
        pipeline = record.pipeline
        names = [str(file["name"]) for link in pipeline.ledger.chain(record.ref) for file in link.quarantine]
        done = []
        for name in names:
            with contextlib.suppress(FileNotFoundError):  # an earlier restore did not bring it along
                data = pipeline.storage.get(f"{quarantine_folder(pipeline.options.name)}/{name}")
                done.append(_put(target, saved_quarantine_key(name), name, data))
        return done


def _schema_of(delta: DeltaTable) -> pa.Schema:
    return pa.schema(delta.schema().to_arrow())


def _put(storage: Storage, key: str, name: str, data: bytes) -> SavedBytes:
    storage.put(key, data)
    return SavedBytes(name, len(data), hashlib.sha256(data).hexdigest())


def _read_bytes(storage: Storage, folder: str, name: str) -> SavedBytes:
    data = storage.get(f"{folder}/{name}")
    return SavedBytes(name, len(data), hashlib.sha256(data).hexdigest())


# -- start --------------------------------------------------------------------------------------------


def check_start(topology: Topology, saved: SavedTopology) -> None:
    """Refuse a topology that is not of the shape of a savepoint. Raises ConfigError."""
    if set(topology.members) != set(saved.members):
        names = ", ".join(sorted(set(topology.members) ^ set(saved.members)))
        raise ConfigError(
            f"the topology has other members than the savepoint: {names}",
            hint="Give its pipelines, sinks and sources the names that they had, and tables of their own.",
        )
    read = {(channel.reader, channel.source) for channel in topology.channels}
    wanted = {(reader, source) for reader, sources in saved.positions.items() for source in sources}
    written = {f"{one.writer}/{one.sink}" for one in topology.channels if one.kind == "delta"}
    topics = set(saved.topics) ^ set(_match_topics(topology, saved))
    if read != wanted or written != set(saved.tables) or topics:
        names = ", ".join(sorted({f"{a}/{b}" for a, b in read ^ wanted} | (written ^ set(saved.tables)) | topics))
        raise ConfigError(
            f"the topology has other channels than the savepoint: {names}",
            hint="Each reader reads the table or topic that its writer writes, as when the savepoint was made.",
        )


def _match_topics(topology: Topology, saved: SavedTopology) -> dict[str, tuple[Channel, ...]]:
    """Return the channels of each saved topic. Its sink has the name that it had, or the same readers and another one:
    on the cluster of the old topology its own name is taken."""
    sinks: dict[tuple[str, str], list[Channel]] = {}
    for channel in topology.channels:
        if channel.kind == "kafka":
            sinks.setdefault((channel.writer, channel.sink), []).append(channel)
    found: dict[str, tuple[Channel, ...]] = {}
    for name, topic in saved.topics.items():
        writer, _, sink = name.partition("/")
        renamed = [one for one in sinks if one[0] == writer and f"{one[0]}/{one[1]}" not in saved.topics]
        for key in [(writer, sink), *(renamed if (writer, sink) not in sinks else [])]:
            channels = sinks.get(key, [])
            if sorted((one.reader, one.source) for one in channels) == sorted(topic.readers):
                if template_columns(_kafka_sink(topology, channels[0]).topic):
                    continue
                found[name] = tuple(channels)
                del sinks[key]
                break
    return found


def check_places(
    topology: Topology, path: str, saved: SavedTopology, storage_options: dict[str, str] | None = None
) -> None:
    """Check, before anything is written, that the tables of the channels are free and the other sources can be read.

    Raises:
        RollbackRefusedError: there is another table in the place of a channel.
        FirnlineError: a source cannot be read, or is not the one of the savepoint.
    """
    place = normalise(path)
    manifests = {name: load_savepoint(open_storage(f"{place}/{name}", storage_options)) for name in saved.members}
    for table in _find_tables(topology, saved, manifests):
        table.is_done()
    read = {(channel.reader, channel.source) for channel in topology.channels}
    for name, options in topology.members.items():
        positions = manifests[name].checkpoint.positions
        sources = open_pipeline(options).sources
        with contextlib.closing(sources):
            for source in sources:
                if (name, source.name) in read:  # the start gives it its place in the new table or topic
                    continue
                try:
                    source.start(positions.get(source.name))
                except SourceMovedError as error:
                    raise SourceMovedError(
                        f"{name}: the source {source.name!r} is not the one of the savepoint: {error.message}",
                        hint=f"Write the old location in the file of {name}, and repeat the command. Afterwards a run "
                        "can move it: firnline run --source-moved OLD=NEW",
                    ) from error


def start_from_savepoint(
    topology: Topology,
    path: str,
    run: str,
    *,
    storage_options: dict[str, str] | None = None,
    report: Callable[[str], None] = lambda _: None,
    progress: Progress | None = None,
    stopping: Callable[[], bool] = lambda: False,
) -> dict[str, Restored]:
    """Take the members of a new topology to a savepoint. Repeatable: it goes on where a killed one ended.

    Raises:
        ConfigError: there is no savepoint, or the topology has another shape.
        RollbackRefusedError: a table of a channel exists already, or a topic is in other use.
        DamagedError: a file of the savepoint differs from what was saved.
    """
    place = normalise(path)
    saved = load_topology_savepoint(open_storage(place, storage_options))
    check_start(topology, saved)
    check_places(topology, path, saved, storage_options)
    members = {name: open_pipeline(options) for name, options in topology.members.items()}
    sources = {name: open_storage(f"{place}/{name}", storage_options) for name in members}
    manifests = {name: load_savepoint(storage) for name, storage in sources.items()}
    is_done = {name: is_restored(pipeline, f"{place}/{name}", storage_options) for name, pipeline in members.items()}
    fills = [
        TopicFill(
            name=name,
            savepoint=manifests[channels[0].writer].id,
            saved=saved.topics[name],
            source=sources[channels[0].writer],
            sink=_kafka_sink(topology, channels[0]),
            channels=channels,
            topology=topology,
        )
        for name, channels in _match_topics(topology, saved).items()
    ]
    for fill in fills:
        if not is_done[fill.writer]:
            fill.check(members[fill.writer].clock)
    tables = list(_find_tables(topology, saved, manifests))
    for table in [one for one in tables if not one.is_done()]:
        report(f"{table.name}: copying {len(table.saved.files)} file(s)")
        table.copy(sources[table.writer], progress, stopping)
    for fill in [one for one in fills if not is_done[one.writer]]:
        report(f"{fill.name}: writing {fill.saved.records} record(s) to {fill.sink.topic}")
        fill.write(run, progress, stopping)
    moved = _find_positions(topology, saved, [one for one in fills if not all(map(is_done.get, one.readers))], progress)
    done = {}
    for name, pipeline in members.items():
        positions = {
            source: moved.get((name, source)) or {**position, "table": pipeline.sources[source].location}
            for source, position in saved.positions.get(name, {}).items()
        }
        done[name] = restore_savepoint(
            pipeline,
            f"{place}/{name}",
            run,
            storage_options,
            positions=positions,
            filled=[fill.sink.name for fill in fills if fill.writer == name],
            report=report,
            progress=progress,
            stopping=stopping,
        )
    return done


def _find_positions(
    topology: Topology, saved: SavedTopology, fills: list[TopicFill], progress: Progress | None
) -> dict[tuple[str, str], Json]:
    """Return the positions of readers, by member and source, in the topics of the new topology."""
    moves: dict[tuple[str, str], dict[str, TopicMove]] = {}
    states: dict[tuple[str, str], dict[str, dict[int, PartitionState]]] = {}
    for fill in fills:
        places = fill.find_states(saved.positions)
        move = fill.read_back(places, progress)
        for channel, of in places.items():
            key = (channel.reader, channel.source)
            moves.setdefault(key, {})[fill.saved.topic] = move
            states.setdefault(key, {})[fill.saved.topic] = of
    found = {}
    for (reader, source), of_topics in moves.items():
        location = next(one for one in topology.members[reader].sources if one.name == source).location
        position = KafkaPosition.from_json(saved.positions[reader][source])
        found[reader, source] = translate(position, states[reader, source], of_topics, location).to_json()
    return found


@dataclass(frozen=True, slots=True)
class _TableCopy:
    """The table of one channel, from the savepoint to where the new topology has it."""

    name: str
    writer: str
    saved: SavedSink
    sink: DeltaSinkOptions
    log: list[SavedBytes]

    def _storage(self) -> Storage:
        return open_storage(self.sink.table, dict(self.sink.storage_options))

    def is_done(self) -> bool:
        """Return whether the table was copied; it may have gone on since.

        Raises:
            RollbackRefusedError: there is another table.
        """
        if self._is_begun():
            return False
        table = Table(normalise(self.sink.table), self.sink.storage_options)
        if not table.refresh() or table.id != self.saved.table_id:
            raise RollbackRefusedError(
                f"{self.name}: there is a table at {self.sink.table} already",
                hint="A new topology starts with tables of its own: name a location that has none.",
            )
        return True

    def _is_begun(self) -> bool:
        """Return whether there is no log, or the beginning of the savepoint's: a copy was killed."""
        storage = self._storage()
        for stat in storage.list(DELTA_LOG):
            name = stat.name.rsplit("/", 1)[-1]
            known = next((file for file in self.log if file.name == name), None)
            if not is_temporary(stat.name) and (
                known is None or sha256_of(storage, f"{DELTA_LOG}/{name}") != known.sha256
            ):
                return False
        return True

    def copy(self, source: Storage, progress: Progress | None, stopping: Callable[[], bool]) -> None:
        """Copy the data files, then the log, version by version."""
        target = self._storage()

        def copy(file: SavedFile) -> str:
            _copy_checked(source, saved_data_key(self.sink.name, file.path), target, file.path, file.sha256)
            return file.path

        what = f"copying {self.name}"
        each(what, self.saved.files, copy, lambda file: file.size_bytes, progress, stopping)
        for file in sorted(self.log, key=lambda one: one.name):
            key = f"{DELTA_LOG}/{file.name}"
            _copy_checked(source, saved_data_key(self.sink.name, key), target, key, file.sha256)


def _find_tables(topology: Topology, saved: SavedTopology, manifests: Mapping[str, Savepoint]) -> Iterator[_TableCopy]:
    for name, log in saved.tables.items():
        writer, _, sink = name.partition("/")
        options = next(one for one in topology.members[writer].sinks if one.name == sink)
        assert isinstance(options, DeltaSinkOptions)
        yield _TableCopy(name, writer, manifests[writer].sinks[sink], options, log)


def _copy_checked(source: Storage, key: str, target: Storage, to: str, sha256: str) -> None:
    """Copy a file, unless a killed command did; what it left half is copied again. Raises DamagedError."""
    with contextlib.suppress(FileNotFoundError):
        if sha256_of(target, to) == sha256:
            return
        target.delete(to)
    fault_point("restore.copy.before")
    _, found = copy_file(source, key, target, to)
    fault_point("restore.copy.after")
    if found != sha256:
        target.delete(to)
        raise DamagedError(f"{key} is not what was saved", hint="Bring the savepoint's file back.")
