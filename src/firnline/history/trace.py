"""Traces an event back: from its id to the epoch, and to the record of a source that its row was made from. Read-only.

The ledger entry of an epoch says where the rows of a source come from, row by row. Rows of an operator come from all
that the epoch read, and from state. Rows of a retry come from dead letters, which are traced further.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from firnline.checkpoint.ledger import LedgerEntry, read_paths
from firnline.errors import ConfigError
from firnline.graph import sink_input
from firnline.history.epoch import EpochView, load_epoch
from firnline.run.open_pipeline import OpenPipeline
from firnline.sinks.origins import ORIGINS, find_origin
from firnline.stores.base import CheckpointStore
from firnline.types import Json

_ID = re.compile(r"(?P<pipeline>.+)/(?P<epoch>[0-9]+)/(?P<port>[^/]+)/(?P<row>[0-9]+)")


@dataclass(frozen=True, slots=True)
class EventId:
    """The id of an event: `<pipeline>/<epoch>/<port>/<index>`."""

    pipeline: str
    epoch: int
    port: str
    row: int

    def __str__(self) -> str:
        return f"{self.pipeline}/{self.epoch}/{self.port}/{self.row}"

    @classmethod
    def parse(cls, text: str) -> EventId:
        """Parse an id. Raises ConfigError if it is none."""
        match = _ID.fullmatch(text.strip())
        if match is None:
            raise ConfigError(
                f"{text!r} is not the id of an event", hint="An id is PIPELINE/EPOCH/PORT/INDEX, e.g. shop/12/orders/0."
            )
        return cls(match["pipeline"], int(match["epoch"]), match["port"], int(match["row"]))


def trace(pipeline: OpenPipeline, store: CheckpointStore | None, event: EventId) -> dict[str, Json]:
    """Return what is known of an event.

    Raises:
        ConfigError: the pipeline, the epoch, the port or the row does not exist.
    """
    options = pipeline.options
    if event.pipeline != options.name:
        raise ConfigError(
            f"the event is of pipeline {event.pipeline!r}, and the spec is that of {options.name!r}",
            hint="Name the spec of that pipeline.",
        )
    view = load_epoch(pipeline, store, event.epoch)
    entry = view.ledger_entry
    return {
        "id": str(event),
        "pipeline": event.pipeline,
        "epoch": event.epoch,
        "port": event.port,
        "row": event.row,
        "created_at": view.checkpoint.created_at,
        "committed_at": next((one.committed_at for one in view.sinks if one.committed_at), None),
        "run": view.checkpoint.run,
        "attempt": view.checkpoint.attempt,
        "entry": view.entry.name if view.entry else None,
        "undone": view.undone,
        "origins": _find_origins(pipeline, store, view, event),
        "inputs": {source: sorted(read_paths(records)) for source, records in entry.inputs.items()} if entry else {},
    }


def _find_origins(
    pipeline: OpenPipeline, store: CheckpointStore | None, view: EpochView, event: EventId
) -> list[dict[str, Json]]:
    """Return where the row comes from: one origin, or one per sink if an epoch has different rows for each."""
    if view.ledger_entry is None:
        return [{"sinks": [], "kind": "folded"}]
    entry, found = view.ledger_entry, list[dict[str, Json]]()
    ports = {one.name: sink_input(pipeline.options, one) for one in pipeline.options.followers}
    staged = {sink: entry.staged[sink] for sink, port in ports.items() if port == event.port and sink in entry.staged}
    if not staged:
        known = sorted(set(ports.values()))
        raise ConfigError(
            f"epoch {event.epoch} has no rows of {event.port!r} for a sink that is delivered from the outbox",
            hint=f"Ports that have such sinks: {', '.join(known) or 'none'}.",
        )
    for sink, files in staged.items():
        origin = _find_in_files(pipeline, store, entry, event, files)
        same = next((one for one in found if {**one, "sinks": []} == {**(origin or {}), "sinks": []}), None)
        if same is not None:
            same["sinks"].append(sink)
        elif origin is not None:
            found.append({"sinks": [sink], **origin})
    if not found:
        rows = max(sum(int(file["rows"]) for file in files) for files in staged.values())
        raise ConfigError(
            f"epoch {event.epoch} has {rows} rows of {event.port!r}, and none with number {event.row}",
            hint="Rows are numbered from 0.",
        )
    return found


def _find_in_files(
    pipeline: OpenPipeline,
    store: CheckpointStore | None,
    entry: LedgerEntry,
    event: EventId,
    files: Sequence[Mapping[str, Json]],
) -> dict[str, Json] | None:
    row = event.row
    for file in files:
        if row >= int(file["rows"]):
            row -= int(file["rows"])
            continue
        if "letters" in file:
            epoch, number = file["letters"][row]
            letter = EventId(event.pipeline, int(epoch), event.port, int(number))
            return {"kind": "dead-letter", "id": str(letter), "of": trace(pipeline, store, letter)["origins"]}
        if ORIGINS in file:
            return _describe(pipeline, entry, event.port, *find_origin(file[ORIGINS], row))
        return {"kind": "operator" if entry.inputs else "copy"}
    return None


def _describe(pipeline: OpenPipeline, entry: LedgerEntry, port: str, origin: str, number: int) -> dict[str, Json]:
    """Return the origin of a row of a source."""
    sources = {one.name: one.type for one in pipeline.options.sources}
    source = port if port in sources else port.rpartition(".")[0]
    found: dict[str, Json] = {"kind": sources.get(source, "source"), "source": source}
    if found["kind"] == "kafka":
        from firnline.sources.kafka.position import PartitionId

        partition = PartitionId.parse(origin)
        return {**found, "topic": partition.topic, "partition": partition.number, "offset": number}
    found |= {"file": origin, "record": number}
    record = next((one for one in entry.inputs.get(source, ()) if _is_input(one, origin, number)), {})
    end = record.get("end") or {}
    if "line" in end and end["line"] == record.get("to"):  # every line up to there is a record
        found["line"] = number + 1
    return found | {key: record[key] for key in ("version", "size_bytes", "etag") if key in record}


def _is_input(record: Mapping[str, Json], origin: str, number: int) -> bool:
    path = str(record["path"])
    is_same = origin == path or origin.endswith(f"/{path}")
    return is_same and int(record.get("from", 0)) <= number < int(record.get("to", number + 1))
