"""Rows for one follower that no epoch job made: a copy of a table, or rows of dead letters, staged in the outbox."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import pyarrow as pa

from firnline.errors import ConfigError, SinkError
from firnline.graph import find_source, sink_input
from firnline.options import OP, SEQUENCE, PipelineOptions
from firnline.run.open_pipeline import OpenPipeline
from firnline.sinks.base import Sink
from firnline.sinks.outbox_rows import OutboxStager, outbox_target
from firnline.storage import normalise
from firnline.types import Json


def find_copied(options: PipelineOptions, sink: str, wanted: str = "", *, same_mode: bool = False) -> str:
    """Return the name of the table to copy into a follower: the wanted one, or the only one with the same input.

    Raises:
        ConfigError: there is none, or the wanted one has another input or, with `same_mode`, another way of writing.
    """
    target = next((one for one in options.sinks if one.name == sink), None)
    if target is None:
        raise ConfigError(f"the spec has no sink {sink!r}", hint="Put it into the spec first.")
    port = sink_input(options, target)
    tables = [one for one in options.sinks if not one.fed_from_outbox and sink_input(options, one) == port]
    same = [one.name for one in tables]
    if not wanted and len(same) == 1:
        wanted = same[0]
    if not wanted and not same:
        raise ConfigError(
            f"no Delta table of the pipeline has the input {port!r}, so sink {sink!r} has nothing to be copied from",
            hint=f"Let it go on without what it lacks: firnline sinks resume {sink} --accept-gap . To have all rows, "
            "add a sink with another name and target and `start: beginning`, and take this one out of the spec.",
        )
    if not wanted:
        raise ConfigError(
            f"sink {sink!r} can be copied from several sinks",
            hint=f"Name one with --from: {', '.join(same)}.",
        )
    if wanted not in same:
        raise ConfigError(
            f"sink {sink!r} cannot be copied from {wanted!r}: it is no table with the input {port!r}",
            hint=f"With that input there are: {', '.join(same) or 'none'}.",
        )
    writes = next(one.write for one in tables if one.name == wanted)
    if same_mode and writes != target.write:
        raise ConfigError(
            f"sink {sink!r} (`write: {target.write}`) cannot be copied from {wanted!r} (`write: {writes}`)",
            hint="Choose a table that is written in the same way, or leave `copy_from` out.",
        )
    return wanted


def stage_copy(
    pipeline: OpenPipeline, sink: str, attempt: str, table: Sink, folder: str, epoch: int | None = None
) -> tuple[list[dict[str, Json]], pa.Schema]:
    """Copy the rows of a table, as it is or as it was after an epoch, into files of the form of the outbox.

    Returns the files and the columns.

    Raises:
        RollbackRefusedError: the table no longer has that epoch.
        SinkError: the table cannot be read, or the files cannot be written.
    """
    options = next(one for one in pipeline.options.sinks if one.name == sink)
    is_changes = (
        options.write == "upsert" and find_source(pipeline.options, sink_input(pipeline.options, options)) is None
    )
    schema = pa.schema([])

    def batches() -> Iterator[pa.RecordBatch]:
        nonlocal schema
        for batch in table.read_rows(epoch):
            found = _as_changes(batch) if is_changes else batch
            schema = found.schema
            yield found

    return stage_rows(pipeline, sink, attempt, batches(), folder), schema


def _as_changes(batch: pa.RecordBatch) -> pa.RecordBatch:
    """Return rows of a table as changes: each inserts the row of its key."""
    columns = [*batch.columns, pa.repeat(pa.scalar("insert"), batch.num_rows), pa.repeat(pa.scalar(0), batch.num_rows)]
    return pa.RecordBatch.from_arrays(columns, names=[*batch.schema.names, OP, SEQUENCE])


def stage_rows(
    pipeline: OpenPipeline, sink: str, attempt: str, batches: Iterable[pa.RecordBatch], folder: str
) -> list[dict[str, Json]]:
    """Stage rows for one follower; returns the files.

    Raises:
        SinkError: they cannot be written.
    """
    home = pipeline.options.home
    outbox = {"root": normalise(home.root), "storage_options": dict(home.storage_options), "folder": folder}
    stager = OutboxStager(outbox_target(sink, outbox, ""), attempt)
    try:
        for batch in batches:
            stager.write(batch)
        return stager.close()
    except OSError as error:
        stager.discard()
        raise SinkError(f"the outbox cannot be written: {error}") from error
    except BaseException:
        stager.discard()
        raise
