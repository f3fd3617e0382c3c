"""Joins a Delta table that was added to a pipeline with history: it gets every epoch after the one it begins with.

The ledger says which table is new: an epoch names every sink that it staged rows for. So nothing is decided or written
when a table joins; the commit that creates it, or the claim of one that exists, says where it begins. What was in
captured tables before is asked for as a snapshot, durable before the first epoch that names the table: the request
stays until an epoch answers it. A rollback to before the beginning makes the table a new one again.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from firnline.checkpoint.ledger import Fold
from firnline.errors import ConfigError, LedgerHoleError, TableLostError
from firnline.graph import Node, graph_of, stateful
from firnline.names import join_request
from firnline.options import SinkOptions, names_tables
from firnline.run.commits import name_in, new_sink_error, staged_for
from firnline.run.joining import ahead_of
from firnline.run.open_pipeline import OpenPipeline
from firnline.sinks.base import Head, Sink, find_birth
from firnline.sinks.parking import is_parked
from firnline.sources.base import MAIN_PORT
from firnline.sources.cdc.options import LogSourceOptions
from firnline.types import EntryRef

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Beginning:
    """Where a table begins that was added to a pipeline with history."""

    entry: EntryRef  # it gets every epoch after this one
    is_new: bool  # no epoch names it yet
    without: int  # the newest epoch that does not name it


def find_beginning(pipeline: OpenPipeline, sink: Sink, tip: EntryRef | None) -> Beginning | None:
    """Return where a further table begins; None if it gets all rows: since the first epoch, a restore, a fresh start.

    Raises:
        LedgerHoleError: the ledger no longer says it.
    """
    if tip is None or tip.epoch == 0 or sink is pipeline.deciding or sink.capabilities.fed_from_outbox:
        return None
    begins = tip
    for link in pipeline.ledger.chain(tip):
        if isinstance(link, Fold):
            if link.is_bridge:
                raise LedgerHoleError(f"ledger entry {link.last.name} is lost", epoch=link.last.epoch)
            return None
        if link.kind == "fresh" or link.epoch == 0:
            return None
        if not link.staged or (link.is_history_edit and link.kind != "restore"):
            continue
        if name_in(link, sink) is None:
            return Beginning(begins, begins == tip, link.epoch)
        if link.kind == "restore" or link.previous is None or link.previous.epoch == 0:
            return None
        begins = link.previous
    return None


def first_entry(pipeline: OpenPipeline, sink: Sink, held: Head, decided: Head) -> EntryRef | None:
    """Return the entry after which a table without a head begins; None if it goes on from its head, or begins with the
    first epoch.

    Raises:
        TableLostError: the table was there, and is gone.
    """
    if held.epoch:
        return None
    try:
        found = find_beginning(pipeline, sink, decided.entry)
    except LedgerHoleError:  # whoever gives the sink what it lacks names it
        return None
    if found is None:
        return None
    for entry, _ in ahead_of(pipeline, decided.entry, found.entry.epoch, sink.name):
        files = staged_for(entry, sink)
        missing = [] if is_parked(files) else sink.find_missing_staged(files, pipeline.storage)
        if missing:
            raise TableLostError(
                f"sink {sink.name!r} begins after epoch {found.entry.epoch}, the table {sink.uri} is gone, and so is "
                f"{missing[0]}, which epoch {entry.epoch} staged for it",
                table=sink.uri,
            )
    return found.entry


# -- what a new table gets ------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class NewTable:
    """A table that no epoch names yet."""

    name: str
    begins: EntryRef
    asks: tuple[tuple[str, str], ...] = ()  # source and table: read again for it
    reads: tuple[str, ...] = ()  # tables that the source reads for the first time
    again: tuple[str, ...] = ()  # other sinks, which get the rows of `asks` again

    def describe(self) -> str:
        """Return what it gets first, for people."""
        words = f"begins after epoch {self.begins.epoch}"
        if self.asks:
            words += f": a run reads {', '.join(table for _, table in self.asks)} again, so that it has all rows"
        if self.reads:
            words += f"{', and' if self.asks else ':'} {', '.join(self.reads)} for the first time"
        if not self.asks and not self.reads:
            words += ": it does not get what was before"
        return words + (f"; {', '.join(self.again)} get these rows again, too" if self.again else "")


def find_new_tables(pipeline: OpenPipeline, decided: Head, heads: Mapping[str, Head]) -> list[NewTable]:
    """Return the tables that no epoch names yet, with what they get first. A sink that is missing in `heads` could not
    be read.

    Raises:
        ConfigError: the spec does not say what one gets first, or it cannot get it.
        SourceError: a source does not answer now.
    """
    found = []
    for sink in pipeline.tables[1:]:
        head = heads.get(sink.name)
        try:
            begins = find_beginning(pipeline, sink, decided.entry)
        except LedgerHoleError as error:
            logger.warning("sink may be new", extra={"sink": sink.name, "reason": error.message})
            continue
        if begins is None or not begins.is_new:
            continue
        if head is not None and head.epoch and _born(sink) < begins.without:
            continue  # it was renamed, or lacks epochs, which its commits tell
        options = next(one for one in pipeline.options.sinks if one.name == sink.name)
        if options.joins is None:
            raise new_sink_error(sink.name, "a sink of this kind, or with a committer, begins with the first epoch")
        found.append(_find_rows(pipeline, options, begins.entry, decided))
    return found


def ask_for_rows(pipeline: OpenPipeline, decided: Head, heads: Callable[[], Mapping[str, Head]]) -> None:
    """Ask for the snapshots that new tables need. Repeatable: the epoch and the table name a request.

    Called under the claim, before an epoch can name the tables.
    """
    if decided.entry is None or not pipeline.tables[1:]:
        return
    for new in find_new_tables(pipeline, decided, heads()):
        logger.info("sink %s", new.describe(), extra={"sink": new.name})
        for source, table in new.asks:
            name = join_request(new.begins.epoch, source, table)
            pipeline.requests.ask_snapshot(table, source, where="", empties=False, ids=pipeline.ids, name=name)


def _born(sink: Sink) -> int:
    """Return the epoch after which a table begins, by its own log; -1 if it holds every epoch since the first."""
    return next((born for commit in sink.read_log() if (born := find_birth(commit.info))), -1)


def _find_rows(pipeline: OpenPipeline, options: SinkOptions, begins: EntryRef, decided: Head) -> NewTable:
    """Return what a new table gets first.

    Raises:
        ConfigError: the spec does not say it, or it is not possible.
    """
    name = options.name
    if options.joins == "now":
        return NewTable(name, begins)
    asks: list[tuple[str, str]] = []
    reads: list[str] = []
    for source, port in source_ports(pipeline, "sink", name):
        captured = next(one for one in pipeline.options.sources if one.name == source)
        if not isinstance(captured, LogSourceOptions):
            raise new_sink_error(name, f"{source} is no captured database, whose rows can be read again", "now")
        if captured.snapshot == "never" and not options.joins:
            raise new_sink_error(name, f"{source} has `snapshot: never`", "now", "snapshot")
        position = decided.checkpoint.positions.get(source) if decided.checkpoint is not None else None
        known = pipeline.sources[source].snapshots(position) if position is not None else {}
        full = pipeline.sources[source].table_name(port) if port != MAIN_PORT else None
        for table in [full] if full is not None else list(known):
            if captured.snapshot == "always" or (table not in known and captured.snapshot != "never"):
                reads.append(table)
            else:
                asks.append((source, table))
    again = find_others(pipeline, name, asks)
    if asks and (folding := [one.name for one in again if one.kind == "operator"]):
        raise new_sink_error(name, f"operator {folding[0]} keeps state and would count the rows twice", "now")
    if again and not options.joins:
        raise new_sink_error(name, f"{again[0].name} would get their rows again, too", "now", "snapshot")
    for source, table in asks:
        try:
            pipeline.sources[source].check_snapshot(table)
        except ConfigError as error:
            raise new_sink_error(name, error.message, "now") from error
    return NewTable(name, begins, tuple(asks), tuple(reads), tuple(one.name for one in again))


def source_ports(pipeline: OpenPipeline, kind: str, name: str) -> list[tuple[str, str]]:
    """Return the ports of sources whose rows reach a sink or an operator."""
    edges, found = graph_of(pipeline.options).edges, dict[tuple[str, str], None]()
    waiting, passed = [(kind, name)], set[tuple[str, str]]()
    while waiting:
        node = waiting.pop()
        passed.add(node)
        for edge in edges:
            if (edge.target.kind, edge.target.name) != node:
                continue
            if edge.source.kind == "source":
                found[edge.source.name, edge.port] = None
            elif ("operator", edge.source.name) not in passed:
                waiting.append(("operator", edge.source.name))
    return list(found)


def find_others(pipeline: OpenPipeline, name: str, asks: list[tuple[str, str]]) -> list[Node]:
    """Return the other sinks and the operators with state that would get rows of these tables a second time. An upsert
    replaces rows by the same ones."""
    options = pipeline.options
    unharmed = {name, *(sink.name for sink in options.sinks if sink.write == "upsert")}
    counting = {operator.name for operator in stateful(options)}
    return [
        node
        for node in graph_of(options).nodes
        if (node.name in counting if node.kind == "operator" else node.kind == "sink" and node.name not in unharmed)
        and any(takes(pipeline, *port, asks) for port in source_ports(pipeline, node.kind, node.name))
    ]


def takes(pipeline: OpenPipeline, source: str, port: str, asks: list[tuple[str, str]]) -> bool:
    """Return whether a port of a source has rows of one of the tables; a pattern may have any of them."""
    if port == MAIN_PORT or names_tables(port):
        return any(asked == source for asked, _ in asks)
    return (source, pipeline.sources[source].table_name(port)) in asks
