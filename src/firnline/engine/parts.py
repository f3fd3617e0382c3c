"""Assembles the parts that a run, or a command that only looks, works with."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from firnline.checkpoint.ledger import Fold, Ledger, LedgerEntry
from firnline.clock import SystemClock
from firnline.engine.recording import Recorder
from firnline.engine.requests import Requests
from firnline.options import PipelineOptions
from firnline.sinks.base import Held
from firnline.sinks.delta import DeltaSink
from firnline.sources.base import Limits
from firnline.sources.files.source import FileSource
from firnline.staging.sink import StagedDeltaSink
from firnline.storage import Storage, open_storage
from firnline.types import Clock, EntryRef, Ids, Json, RandomIds


@dataclass(frozen=True, slots=True)
class Parts:
    """Source, sinks and ledger of one pipeline. The deciding sink is the first of `sinks`."""

    options: PipelineOptions
    source: FileSource
    sinks: tuple[DeltaSink, ...]
    ledger: Ledger
    storage: Storage  # the deciding sink's table
    requests: Requests
    clock: Clock
    ids: Ids
    recorder: Recorder

    @property
    def deciding(self) -> DeltaSink:
        return self.sinks[0]

    def sink(self, name: str) -> DeltaSink:
        return next(sink for sink in self.sinks if sink.name == name)

    def limits(self, parallelism: int) -> Limits:
        """How much one plan may take."""
        batch = self.options.batch
        return Limits(
            max_files=batch.max_files,
            max_bytes=batch.max_bytes,
            max_events=batch.max_events,
            max_ms=batch.max_ms,
            max_output_files=batch.max_output_files,
            parallelism=parallelism,
        )

    def known_files(self, tip: EntryRef | None) -> dict[str, str]:
        """Every file that the ledger knows, with its etag. LedgerHoleError when the chain is broken."""
        found: dict[str, str] = {}
        for file in self.ledger_files(tip):  # newest first: the last time a file was read is what counts
            found.setdefault(str(file["path"]), str(file.get("etag", "")))
        return found

    def ledger_files(self, tip: EntryRef | None) -> Iterator[dict[str, Json]]:
        """What the ledger says of every file, newest epoch first."""
        for link in self.ledger.chain(tip):
            records = link.inputs.get(self.source.name, [])
            if isinstance(link, Fold):
                yield from reversed(records)
            else:
                yield from ({**record, "epoch": link.epoch} for record in records)

    def entries(self, tip: EntryRef | None) -> Iterator[LedgerEntry]:
        """The entries that are not folded yet, newest first."""
        return (link for link in self.ledger.chain(tip) if isinstance(link, LedgerEntry))

    def load(self) -> Held:
        """What the deciding sink holds."""
        return self.deciding.load()


def assemble(
    options: PipelineOptions,
    *,
    once: bool = False,
    moved: tuple[str, str] | None = None,
    clock: Clock | None = None,
    ids: Ids | None = None,
) -> Parts:
    """Make the parts of a pipeline; nothing is read or written yet."""
    clock = clock or SystemClock()
    deciding = options.deciding
    storage = open_storage(deciding.table, deciding.storage_options)
    ledger = Ledger(storage, options.name)
    source = FileSource(options.source, once=once, moved=moved)

    def replay(positions: dict[str, Json], inputs: dict[str, list[dict[str, Json]]]) -> dict[str, Json]:
        records = inputs.get(source.name, [])
        return {**positions, source.name: source.replay(positions[source.name], records)}

    ordered = [deciding, *(s for s in options.sinks if s is not deciding)]
    kinds: dict[str, type[DeltaSink]] = {"direct": DeltaSink, "staged": StagedDeltaSink}
    sinks = tuple(kinds[s.mode](s, options.name, ledger, clock, replay) for s in ordered)
    recorder = Recorder(options, ledger, clock, storage.root)
    sinks[0].copies = recorder.tiers
    return Parts(
        options, source, sinks, ledger, storage, Requests(storage, options.name), clock, ids or RandomIds(), recorder
    )
