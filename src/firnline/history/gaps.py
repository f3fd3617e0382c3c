"""Gaps in the logs of captured databases: which tables would lose changes, and how a person accepts it.

A gap is accepted for a source only if every table that may have lost changes is emptied and read again behind it, or if
the person says that the rest may be lost. The file of the spool that passes over the gap names the tables that are read
again, so both become durable at once.
"""

from __future__ import annotations

import logging
import shlex
import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

from firnline.clock import monotonic
from firnline.errors import ConfigError, SourceError, SourceGapError
from firnline.history.snapshots import ask_snapshot, find_readable
from firnline.history.store import on_record
from firnline.run.open_pipeline import OpenPipeline
from firnline.sources.base import CapturedTable
from firnline.types import Json

logger = logging.getLogger(__name__)

BUSY_SECONDS, PAUSE_SECONDS = 20.0, 0.5  # so long the reader of a run that has ended may hold the log
MOST_NAMES = 20  # that a command names one by one


@dataclass(frozen=True, slots=True)
class Wanted:
    """What a person wants of the tables of one source."""

    source: str
    reads: tuple[str, ...]  # by full name: emptied and read again
    losing: tuple[CapturedTable, ...]  # that lose changes by a gap
    gap: SourceGapError | None  # why the log does not continue now

    @property
    def lost(self) -> list[CapturedTable]:
        """The tables whose changes would be lost."""
        return [one for one in self.losing if one.name not in self.reads]


@dataclass(frozen=True, slots=True)
class GapWishes:
    """What a person wants of logs that do not continue, and of tables."""

    accepted: bool = False  # what is lost may be lost
    resnapshot: tuple[str, ...] = ()  # TABLE or SOURCE:TABLE
    resnapshot_all: bool = False
    command: str = "firnline run"  # to paste, without these options

    def find_tables(self, pipeline: OpenPipeline) -> list[tuple[str, str]]:
        """Return the sources and the full names of the tables that the person names.

        Raises:
            ConfigError: one of the tables cannot be read again, or no source has a log.
            SourceError: the server does not answer.
        """
        logs = _logs(pipeline)
        if (self.accepted or self.resnapshot_all) and not logs:
            option = "--accept-gap" if self.accepted else "--resnapshot-all"
            raise ConfigError(f"{option}: no source of this pipeline reads the log of a database")
        found = []
        for words in self.resnapshot:
            source, colon, table = words.partition(":")
            source, table = (source, table) if colon and source in logs else ("", words)
            found.append(find_readable(pipeline, table, source, partial(_name_both, table)))
        return list(dict.fromkeys(found))

    def perform(self, pipeline: OpenPipeline) -> None:
        """Accept gaps, and ask for snapshots. Called while no other run of the pipeline is active.

        Where the log continues, a table is asked for as any snapshot is, and no gap that comes later is accepted.

        Raises:
            SourceGapError: tables would lose changes that nobody has named; nothing is done.
            ConfigError, SourceError: as `find_tables`.
            SinkError: the audit trail cannot be written.
        """
        if not (self.accepted or self.resnapshot or self.resnapshot_all):
            return
        named = self.find_tables(pipeline)
        wanted = [self._look(pipeline, name, named) for name in _logs(pipeline)]
        refused = [one for one in wanted if one.gap is not None and one.lost]
        if refused and not self.accepted:
            raise self._refusal(pipeline, wanted, refused)
        for one in wanted:
            if one.gap is not None:
                self._accept(pipeline, one)
        asked = {(one.source, one.path) for one in pipeline.requests.load() if one.kind == "snapshot" and one.empties}
        for one in wanted:
            if one.gap is None:
                for table in one.reads:
                    if (one.source, table) not in asked:
                        ask_snapshot(pipeline, one.source, table, empties=True)
                if self.accepted:  # the log may have a gap further on
                    self._accept(pipeline, one)
                elif one.reads and not one.lost:
                    pipeline.sources[one.source].accept_gap(one.reads)

    def _look(self, pipeline: OpenPipeline, source: str, named: Sequence[tuple[str, str]]) -> Wanted:
        checkpoint = pipeline.load().checkpoint
        position = checkpoint.positions.get(source) if checkpoint is not None else None
        reads = tuple(table for owner, table in named if owner == source)
        if position is None:  # the first run reads all tables
            return Wanted(source, reads, (), None)
        gap = _find_gap(pipeline, source, position)
        losing = tuple(pipeline.sources[source].find_losing(position))
        if self.resnapshot_all:
            reads = tuple(dict.fromkeys([*reads, *(one.name for one in losing if one.key)]))
        return Wanted(source, reads, losing, gap)

    def _accept(self, pipeline: OpenPipeline, wanted: Wanted) -> None:
        """Let a source pass over its gap, and record who accepted it."""
        lost = [one.name for one in wanted.lost]
        facts: dict[str, Json] = {
            "source": wanted.source,
            "reason": wanted.gap.message if wanted.gap is not None else "",
            "reads": list(wanted.reads),
            "loses": lost,
        }
        newest = pipeline.load().epoch
        with on_record(pipeline, "accept-gap", pipeline.ids.new(), from_epoch=newest, to_epoch=None, **facts):
            pipeline.sources[wanted.source].accept_gap(wanted.reads)
        if lost and wanted.gap is not None:
            text = "changes of tables between the position and the begin of the log are lost"
            logger.warning(text, extra={"source": wanted.source, "tables": _list(lost)})

    def _refusal(self, pipeline: OpenPipeline, wanted: Sequence[Wanted], refused: Sequence[Wanted]) -> SourceGapError:
        """Return the error that names the tables which would lose changes, and the commands to paste."""
        gaps = [(one.source, one.gap.message) for one in refused if one.gap is not None]
        reasons = "; ".join(f"the log of source {source!r} does not continue: {reason}" for source, reason in gaps)
        lost = [(one.source, table) for one in refused for table in one.lost]
        named = [(one.source, table) for one in wanted for table in one.reads]
        readable = [(source, table.name) for source, table in lost if table.key]
        unreadable = [table.name for _, table in lost if not table.key]
        hint = "Nothing was done."
        if readable:
            command = self._command(pipeline, [*named, *readable], accepts=bool(unreadable))
            hint += f" Read these tables again, too: `{command}`."
        if unreadable:
            verb, rows = ("has", "its") if len(unreadable) == 1 else ("have", "their")
            hint += f" {_list(unreadable)} {verb} no key and cannot be read again: {rows} rows would come twice."
        hint += f" Or lose what changed in between: `{self._command(pipeline, named, accepts=True)}`."
        tables = _list([table.name for _, table in lost])
        return SourceGapError(f"{reasons}; what changed since then in {tables} would be lost", hint=hint)

    def _command(self, pipeline: OpenPipeline, tables: Sequence[tuple[str, str]], *, accepts: bool) -> str:
        """Return the command that reads tables again, for a shell."""
        words = [self.command]
        if self.resnapshot_all or len(tables) > MOST_NAMES:
            words.append("--resnapshot-all")
        else:
            words += [f"--resnapshot {shlex.quote(self._name(pipeline, *one))}" for one in dict.fromkeys(tables)]
        return " ".join([*words, *(["--accept-gap"] if accepts else [])])

    @staticmethod
    def _name(pipeline: OpenPipeline, source: str, table: str) -> str:
        """Return the name of a table for `--resnapshot`."""
        owners = [name for name in _logs(pipeline) if pipeline.sources[name].table_name(table) is not None]
        return table if len(owners) == 1 else f"{source}:{table}"


def _name_both(table: str, source: str) -> str:
    return f"--resnapshot {shlex.quote(f'{source}:{table}')}"


def _logs(pipeline: OpenPipeline) -> list[str]:
    return [source.name for source in pipeline.sources if source.has_log]


def _list(names: Sequence[str]) -> str:
    shown = ", ".join(names[:MOST_NAMES])
    return f"{shown} and {len(names) - MOST_NAMES} more" if len(names) > MOST_NAMES else shown


def _find_gap(pipeline: OpenPipeline, source: str, position: Json) -> SourceGapError | None:
    """Return why the log of a source does not continue; None if it does."""
    deadline = monotonic() + BUSY_SECONDS
    while True:
        try:
            return pipeline.sources[source].find_gap(position)
        except SourceError as error:
            if not error.retryable or monotonic() > deadline:
                raise
        time.sleep(PAUSE_SECONDS)
