"""Opens a pipeline: its sources, sinks, ledger and copies, for a run or for a read-only command."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

from firnline.checkpoint.ledger import Fold, Ledger, LedgerEntry
from firnline.clock import SystemClock
from firnline.errors import ConfigError
from firnline.graph import find_source, graph_of, output_key, sink_input
from firnline.names import outbox_folder, state_folder, tier_state_folder
from firnline.options import PipelineOptions, SchemaOptions, names_tables
from firnline.run.recorder import Recorder
from firnline.run.requests import Requests
from firnline.sinks.base import Head, Sink, SinkContext
from firnline.sinks.guard import ANSWER_SECONDS, WORK_SECONDS, GuardedSink
from firnline.sinks.known import check_names, check_targets
from firnline.sinks.registry import open_sinks
from firnline.sources.base import NOT_READ, Limits, Source, port_name
from firnline.sources.group import Sources
from firnline.sources.guard import GuardedSource
from firnline.sources.known import KnownFiles
from firnline.sources.registry import open_source
from firnline.state.home import StateHome
from firnline.storage import Storage, normalise, open_storage
from firnline.stores.audit import Actor
from firnline.stores.tiers import Tiers
from firnline.types import Clock, EntryRef, Ids, Json, RandomIds


@dataclass(frozen=True, slots=True)
class OpenPipeline:
    """Sources, sinks and ledger of one pipeline. The deciding sink is the first of `sinks`."""

    options: PipelineOptions
    sources: Sources
    sinks: tuple[Sink, ...]
    ledger: Ledger
    storage: Storage  # of the pipeline's home
    requests: Requests
    clock: Clock
    ids: Ids
    recorder: Recorder
    actor: Actor | None = None  # who acts through this process, for the audit trail; None: its user

    @property
    def deciding(self) -> Sink:
        """The sink whose commit makes an epoch true."""
        return self.sinks[0]

    @property
    def decided_in(self) -> str:
        """What decides, in words for messages."""
        return "the journal" if self.options.journal is not None else "the table"

    @property
    def counted(self) -> str:
        """The name of the sink whose rows a run counts: the deciding one, or the first one if the journal decides."""
        return (self.options.sinks[0] if self.options.journal is not None else self.options.deciding).name

    @property
    def tables(self) -> tuple[Sink, ...]:
        """The sinks that are not followers, the deciding one first: their rows are saved and restored."""
        return tuple(sink for sink in self.sinks if not sink.capabilities.fed_from_outbox)

    @property
    def state_home(self) -> StateHome:
        """The location of operator state: the local tier if there is one, else beside the ledger."""
        checkpoint, name = self.options.checkpoint, self.options.name
        remote = None
        if checkpoint.remote is not None:
            remote = StateHome(f"{checkpoint.remote.uri}/{tier_state_folder(name)}", checkpoint.remote.storage_options)
        if checkpoint.local is not None:
            return StateHome(f"{checkpoint.local.path}/{tier_state_folder(name)}", fallback=remote)
        root = f"{self.storage.root}/{state_folder(name)}"
        return StateHome(root, self.options.home.storage_options, fallback=remote)

    def open_readers(self) -> tuple[Sink, ...]:
        """Open the same sinks again for reads from another thread: a sink and its table handle serve one lane.

        An optional sink has little time to answer, because the deciding sink's lane waits for it.
        """
        return _open_sinks(self.options, self.ledger, self.clock, self.sources, self.recorder, ANSWER_SECONDS)

    def sink(self, name: str) -> Sink:
        """Return the sink with this name."""
        return next(sink for sink in self.sinks if sink.name == name)

    def limits(self, parallelism: int, files_per_task: int = 1) -> Limits:
        """Return the limits of one plan."""
        batch = self.options.batch
        return Limits(
            max_files=batch.max_files,
            max_bytes=batch.max_bytes,
            max_events=batch.max_events,
            max_ms=batch.max_ms,
            max_output_files=batch.max_output_files,
            parallelism=parallelism,
            files_per_task=files_per_task,
            respect_source_tx=batch.respect_source_tx,
        )

    def add_known(self, known: Mapping[str, KnownFiles], tip: EntryRef | None) -> None:
        """Add every file in the ledger with its etag and end, per source: two sources may read the same file.

        Raises:
            LedgerHoleError: the chain is broken.
        """
        for name, file in self.ledger_files(tip):  # newest first: the most recent read of a file counts
            if is_read(file):
                known[name].add(str(file["path"]), str(file.get("etag", "")), self.sources[name].known_end(file))

    def ledger_files(self, tip: EntryRef | None) -> Iterator[tuple[str, dict[str, Json]]]:
        """Yield the ledger's records of every file of every source, newest epoch first."""
        for link in self.ledger.chain(tip):
            for name in self.sources.names:
                records = link.inputs.get(name, [])
                if isinstance(link, Fold):
                    yield from ((name, record) for record in reversed(records))
                else:
                    yield from ((name, {**record, "epoch": link.epoch}) for record in records)

    def entries(self, tip: EntryRef | None) -> Iterator[LedgerEntry]:
        """Return the entries that are not folded yet, newest first."""
        return (link for link in self.ledger.chain(tip) if isinstance(link, LedgerEntry))

    def load(self) -> Head:
        """Return the head of the deciding sink."""
        return self.deciding.load()


def is_read(record: Mapping[str, Json]) -> bool:
    """Return whether an input record counts in a search for late input.

    The position names input that is pending; quarantined records that were read again are no input of their own, nor is
    a request that was refused.
    """
    return record.get("status") not in NOT_READ


def open_pipeline(
    options: PipelineOptions,
    *,
    once: bool = False,
    moved: tuple[str, str] | None = None,
    clock: Clock | None = None,
    ids: Ids | None = None,
    strict_store: bool = False,
    actor: Actor | None = None,
) -> OpenPipeline:
    """Open a pipeline. Reads and writes nothing yet.

    Raises:
        ConfigError: a sink cannot do what the spec asks, or a source has contradicting settings.
    """
    check_names(options.followers)
    check_targets(options.sinks)
    clock = clock or SystemClock()
    storage = open_storage(options.home.root, options.home.storage_options)
    ledger = Ledger(storage, options.name)
    sources = _open_sources(options, once, moved)
    recorder = Recorder(options, ledger, clock, storage.root, strict_store=strict_store)
    sinks = _open_sinks(options, ledger, clock, sources, recorder, WORK_SECONDS)
    requests = Requests(storage, options.name)
    return OpenPipeline(options, sources, sinks, ledger, storage, requests, clock, ids or RandomIds(), recorder, actor)


def _open_sinks(
    options: PipelineOptions,
    ledger: Ledger,
    clock: Clock,
    sources: Sources,
    recorder: Recorder,
    seconds: float,
) -> tuple[Sink, ...]:
    """Open the sinks, each behind its guard. `seconds` limits a call to an optional one."""
    deciding, home = options.deciding, options.home
    outbox = {
        "root": normalise(home.root),
        "storage_options": dict(home.storage_options),
        "folder": outbox_folder(options.name),
    }
    keys = {operator.name: output_key(operator) for operator in options.operators}
    inputs = [
        (sink, sink_input(options, sink) if sink is not options.journal else "") for sink in options.ordered_sinks
    ]
    opened = open_sinks(
        [
            (
                sink,
                SinkContext(
                    pipeline=options.name,
                    ledger=ledger,
                    clock=clock,
                    replay=sources.replay,
                    decides=sink is deciding,
                    copies=recorder.tiers if sink is deciding else Tiers(),
                    outbox=None if sink is deciding or (sink.required and not sink.fed_from_outbox) else outbox,
                    input_port=read,
                    input_key=keys.get(read, ()),
                    input_is_source=find_source(options, read) is not None,
                    find_input_key=_key_finder(options, sources, read),
                    input_schema=_schema_options(options, read),
                ),
            )
            for sink, read in inputs
        ]
    )
    kinds = [sink.type for sink in options.ordered_sinks]
    return tuple(GuardedSink(sink, kind, seconds) for sink, kind in zip(opened, kinds, strict=True))


def _key_finder(options: PipelineOptions, sources: Sources, read: str) -> Callable[[], tuple[str, ...]] | None:
    """Return what asks a source for the key of one of its tables; None if the input is no captured table."""
    found = find_source(options, read)
    if found is None or not found[1] or not sources[found[0].name].has_keys:
        return None
    source, port = sources[found[0].name], found[1]
    return lambda: source.find_key(port) or ()


def _schema_options(options: PipelineOptions, read: str) -> SchemaOptions:
    """Return how the source of an input treats new columns."""
    found = find_source(options, read)
    return found[0].schema_of(found[1]) if found is not None else SchemaOptions()


def _open_sources(options: PipelineOptions, once: bool, moved: tuple[str, str] | None) -> Sources:
    """Open the sources; `moved` applies to the source at the new location."""
    found = [open_source(one.for_pipeline(options.name, options.home), once=once) for one in options.sources]
    if moved is not None:
        to = normalise(moved[1])
        locations = [source.location for source in found]
        if to not in locations:
            raise ConfigError(f"--source-moved says {moved[1]}, the spec says {', '.join(locations)}")
        at = locations.index(to)
        found[at] = open_source(options.sources[at].for_pipeline(options.name, options.home), once=once, moved=moved)
    guarded = [GuardedSource(source, one.type) for source, one in zip(found, options.sources, strict=True)]
    sources = Sources(guarded, once=once)
    _check_ports(options, sources)
    for source in sources:
        source.watch_keys(_upserted_ports(options, source.name))
    return sources


def _upserted_ports(options: PipelineOptions, source: str) -> list[str]:
    """Return the ports of many tables of a source that sinks upsert."""
    reads = [find_source(options, sink_input(options, one)) for one in options.sinks if one.write == "upsert"]
    return [port for one, port in filter(None, reads) if one.name == source and names_tables(port)]


def _port_hint(source: Source, port: str) -> str:
    known = source.known_ports()
    close = difflib.get_close_matches(port, known, n=1)
    meant = f"Did you mean {port_name(source.name, close[0])}? " if close else ""
    return f"{meant}Read one of these: {', '.join(port_name(source.name, one) for one in known)}."


def _check_ports(options: PipelineOptions, sources: Sources) -> None:
    """Refuse a sink or operator that reads a port which its source does not have."""
    for edge in graph_of(options).edges:
        if edge.source.kind != "source" or sources[edge.source.name].has_port(edge.port):
            continue
        source = sources[edge.source.name]
        port = f'port "{edge.port}"' if edge.port else "main port"
        raise ConfigError(
            f'{edge.target.kind} "{edge.target.name}" reads "{port_name(source.name, edge.port)}", '
            f'but source "{source.name}" has no {port}',
            hint=_port_hint(source, edge.port),
        )
