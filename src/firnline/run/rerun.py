"""Makes the rows of a decided epoch again from its input: for a damaged file of the outbox, and to fill a new sink.

Nothing is committed here, and no position moves: the slice is read from the ledger entry, and its rows are staged.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import pyarrow as pa

from firnline.checkpoint.ledger import LedgerEntry
from firnline.errors import FirnlineError, LedgerHoleError, OutboxLostError
from firnline.graph import find_source, resolve_port, sink_input, upstream
from firnline.jobs.epoch_job import EpochJob, EpochJobs
from firnline.names import rerun_folder
from firnline.options import PipelineOptions
from firnline.run.open_pipeline import OpenPipeline
from firnline.run.progress import Progress
from firnline.run.restore_state import known_watermarks
from firnline.schema import schema_from_json, widen, wider_columns
from firnline.sinks.base import Sink
from firnline.sinks.outbox import KEY
from firnline.sinks.outbox_rows import is_whole, outbox_target, read_outbox, rebuild
from firnline.sinks.row_checksum import ROWS_CHECKSUM
from firnline.sources.columns import columns_from_json
from firnline.types import Json

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class MadeRows:
    """Rows that were made again, in files of the form of the outbox."""

    attempt: str
    files: list[dict[str, Json]]
    schema: pa.Schema


class Rerun:
    """Makes rows again in one run. Lanes of several sinks may use it at once."""

    def __init__(self, pipeline: OpenPipeline, progress: Progress, jobs: EpochJobs) -> None:
        self._pipeline = pipeline
        self._progress = progress
        self._jobs = jobs

    def repair(self, sink: Sink, entry: LedgerEntry, files: Sequence[dict[str, Json]]) -> None:
        """Make the rows of damaged and missing files again, and put them in their place.

        Raises:
            OutboxLostError: the rows cannot be made again, or are not those that were decided.
        """
        pipeline, damaged, first = self._pipeline, list[tuple[int, dict[str, Json]]](), 0
        for file in files:
            if not is_whole(pipeline.storage, file):
                damaged.append((first, file))
            first += int(file["rows"])
        if not damaged:  # another process was faster
            return
        name = str(damaged[0][1][KEY])
        if any(ROWS_CHECKSUM not in file for _, file in damaged):
            raise self.lost(sink, entry, name, "a version of Firnline wrote it that kept no checksum of its rows")
        if not any(entry.inputs.values()):
            raise self.lost(sink, entry, name, "its rows are a copy, and do not come from the input")
        with self.made(sink, entry, name) as made:
            rows = sum(int(file["rows"]) for file in made.files)
            if rows != first:
                raise self.lost(sink, entry, name, f"the input gives {rows} rows now, and gave {first}")
            for start, file in damaged:
                if not rebuild(pipeline.storage, file, self._take(made, start, int(file["rows"]))):
                    raise self.lost(sink, entry, str(file[KEY]), "the input gives other rows now")
        facts = {"sink": sink.name, "epoch": entry.epoch, "files": len(damaged)}
        logger.warning("outbox repaired: the input gave the same rows", extra=facts)

    def _take(self, made: MadeRows, first: int, rows: int) -> list[pa.RecordBatch]:
        """Return so many rows from number `first` on."""
        found: list[pa.RecordBatch] = []
        for batch in read_outbox(self._pipeline.storage, made.files, skip=first):
            found.append(batch.slice(0, rows))
            rows -= found[-1].num_rows
            if not rows:
                break
        return found

    @contextlib.contextmanager
    def made(self, sink: Sink, entry: LedgerEntry, what: str, *, keep: bool = False) -> Iterator[MadeRows]:
        """Make the rows of an epoch for one sink again. Their files are deleted at the end, unless they are to stay.

        `what` names what is lost if that fails.

        Raises:
            OutboxLostError: they cannot be made again.
        """
        attempt = self._pipeline.ids.new()
        self._progress.reruns.add(attempt)  # until here, a sweep takes the files for left behind
        try:
            try:
                yield self._make(sink, entry, what, attempt)
            finally:
                if not keep:
                    self._delete(attempt)
        finally:
            self._progress.reruns.discard(attempt)

    def _delete(self, attempt: str) -> None:
        storage = self._pipeline.storage
        folder = f"{rerun_folder(self._pipeline.options.name)}/{attempt}"
        with contextlib.suppress(OSError):  # the next sweep deletes what is left
            for stat in list(storage.list(folder)):
                storage.delete(stat.name.removeprefix(f"{storage.root}/"))

    def _make(self, sink: Sink, entry: LedgerEntry, what: str, attempt: str) -> MadeRows:
        pipeline, jobs = self._pipeline, self._jobs
        refused = self.find_obstacle(sink, [entry])
        if refused:
            raise self.lost(sink, entry, what, refused)
        port = self._port(sink)
        folder = jobs.folder(rerun_folder(pipeline.options.name))
        by_name = {one.name: one for one in pipeline.options.sinks}
        targets = {
            name: {
                **outbox_target(name, folder, port),
                "partition_by": list(getattr(by_name[name], "partition_by", ())),  # rows have these columns, too
            }
            for name in jobs.flow.sinks_of(port)
        }
        needed = sources_of(pipeline.options, port)
        inputs = {name: records for name, records in entry.inputs.items() if name in needed}
        before, after = self._columns(entry)
        job = EpochJob(
            entry.epoch,
            attempt,
            entry.epoch_time,
            pipeline.sources.replan(entry.checkpoint.positions, inputs, jobs.engine.parallelism),
            before,
            columns_after=after,
            skip=frozenset(operator.name for operator in jobs.flow.stateful),
            recorded=known_watermarks(jobs.flow, entry.checkpoint),
            targets=targets,
        )
        try:
            produced = jobs.run(job).produced
        except FirnlineError as error:
            if error.retryable:
                raise
            raise self.lost(sink, entry, what, error.message) from error
        for name, reason in produced.failed.items():
            raise self.lost(sink, entry, what, f"{name} {reason}")
        return MadeRows(attempt, produced.staged.get(sink.name, []), produced.schemas.get(sink.name, pa.schema([])))

    def find_obstacle(self, sink: Sink, entries: Sequence[LedgerEntry]) -> str:
        """Return why the rows of these epochs (newest first) cannot be made again for a sink; empty if they can.

        Raises:
            SourceError: a source does not answer now.
        """
        head = self._progress.head.checkpoint
        return find_obstacle(self._pipeline, sink.name, entries, head.positions if head is not None else {})

    def _port(self, sink: Sink) -> str:
        options = self._pipeline.options
        return sink_input(options, next(one for one in options.sinks if one.name == sink.name))

    def _columns(self, entry: LedgerEntry) -> tuple[dict[str, pa.Schema], dict[str, pa.Schema]]:
        """Return the columns of the ports of sources before and after an epoch.

        Those of a port that goes straight to a table are in the entries of the epochs that had rows. Columns that the
        epoch made wider have the wider type from the start: its tasks read everything again with it.
        """
        after, before, oldest = self._columns_after(entry), dict[str, pa.Schema](), entry
        unknown = set(after)
        with contextlib.suppress(LedgerHoleError):
            for older, _ in self._pipeline.ledger.entries(entry.previous):
                oldest = older
                before |= {port: found for port, found in self._columns_after(older).items() if port in unknown}
                unknown -= before.keys()
                if not unknown:
                    break
        if oldest.previous is not None:  # folded or lost: then the columns after the epoch have to do
            before |= {port: after[port] for port in unknown}
        return {port: widen(old, wider_columns(old, after.get(port, old))) for port, old in before.items()}, after

    def _columns_after(self, entry: LedgerEntry) -> dict[str, pa.Schema]:
        options = self._pipeline.options
        found: dict[str, pa.Schema] = {}
        for one in options.sinks:
            port = sink_input(options, one)
            names = (one.name, getattr(one, "renamed_from", ""))
            columns = next((entry.schema_of(name) for name in names if name in entry.staged), None)
            if columns and port not in found and find_source(options, port) is not None:
                found[port] = schema_from_json(columns)
        return {**found, **columns_from_json(entry.checkpoint.columns)}

    def lost(self, sink: Sink, entry: LedgerEntry, what: str, reason: str) -> OutboxLostError:
        """Return the error for rows that cannot be made again."""
        return OutboxLostError(
            f"{what}, which sink {sink.name!r} needs of epoch {entry.epoch}, cannot be made again: {reason}",
            hint=way_out(self._pipeline.options, sink.name),
            sink=sink.name,
            epoch=entry.epoch,
        )


def sources_of(options: PipelineOptions, port: str) -> set[str]:
    """Return the sources whose rows reach a port."""
    names = {source.name for source in options.sources}
    own = resolve_port(port, [*names, *(operator.name for operator in options.operators)])[0]
    return ({own} | {node.name for node in upstream(options, port)}) & names


def find_obstacle(pipeline: OpenPipeline, sink: str, entries: Sequence[LedgerEntry], positions: dict[str, Json]) -> str:
    """Return why the rows of these epochs (newest first) cannot be made again for a sink; empty if they can.

    Raises:
        SourceError: a source does not answer now.
    """
    options = pipeline.options
    port = sink_input(options, next(one for one in options.sinks if one.name == sink))
    operators = {operator.name: operator for operator in options.operators}
    own = resolve_port(port, [*pipeline.sources.names, *operators])[0]
    above = [operators[name] for name in (own, *(node.name for node in upstream(options, port))) if name in operators]
    holding = [operator.name for operator in above if not operator.is_sql]
    if holding:
        return f"its rows come from operator {holding[0]!r}, which keeps state"
    gone = sorted({name for entry in entries for name in entry.inputs} - set(pipeline.sources.names))
    if gone:
        return f"the spec no longer has the source {gone[0]!r}"
    needed = sources_of(options, port)
    inputs = [{name: of for name, of in entry.inputs.items() if name in needed} for entry in entries]
    unavailable = pipeline.sources.find_unavailable({n: p for n, p in positions.items() if n in needed}, inputs)
    if unavailable:
        more = f", and {len(unavailable) - 1} more" if len(unavailable) > 1 else ""
        return f"the input can no longer be read: {unavailable[0]}{more}"
    return ""


def way_out(options: PipelineOptions, sink: str) -> str:
    """Return what to type if the rows that a sink lacks cannot be made again."""
    port = sink_input(options, next(one for one in options.sinks if one.name == sink))
    tables = [one.name for one in options.sinks if not one.fed_from_outbox and sink_input(options, one) == port]
    if tables:
        return f"Copy the sink anew: firnline sinks resync {sink} --from {tables[0]} --yes"
    return (
        f"No table has these rows. Without them the sink goes on with: firnline sinks resume {sink} --accept-gap --yes"
    )
