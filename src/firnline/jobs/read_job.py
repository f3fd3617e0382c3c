"""The read job of an epoch: every planned file of every source, in one Spark job, until all tasks agree on types."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from firnline.errors import BadRecordsError, SchemaError
from firnline.exchange import Exchanged
from firnline.jobs.engine import Engine
from firnline.jobs.read_orders import Context, Produced, ReadOrder, ReadReport, collect, columns_of, make_orders
from firnline.jobs.worker import Watch, run_watched
from firnline.sources.columns import Columns, agree
from firnline.sources.group import EpochPlan

JUDGED_RECORDS = 100  # with fewer records, a ratio of bad ones says little
SCHEMA_ROUNDS = 8  # types only widen, so this is never reached; it stops an endless loop after a bug


@dataclass(slots=True)
class _Reading:
    """One source while its tasks agree on types."""

    context: Context
    columns: Columns
    wanted: set[int]
    reports: dict[int, ReadReport] = field(default_factory=dict)

    def take(self, done: Mapping[int, ReadReport]) -> None:
        self.reports |= done
        numbers = sorted(self.reports)
        self.columns, again = agree(self.columns, [self.reports[n].end for n in numbers])
        self.wanted = {numbers[n] for n in again}


def read_sources(
    engine: Engine, plan: EpochPlan, contexts: Mapping[str, Context], watch: Watch
) -> tuple[Produced, list[ReadReport]]:
    """Read the plan. Returns the output and the reports of all tasks, in the order of the rows.

    Raises:
        WorkerLostError: a task stopped its heartbeat, or the job took too long.
        SchemaError: tasks do not agree on the types of their columns.
        BadRecordsError: most records of a source are bad.
    """
    readings = {
        name: _Reading(contexts[name], columns_of(contexts[name], part), set(range(len(part.splits))))
        for name, part in plan.plans.items()
    }
    for _ in range(SCHEMA_ROUNDS):
        open_ones = {name: reading for name, reading in readings.items() if reading.wanted}
        if not open_ones:
            break
        orders: list[ReadOrder] = []
        asked: list[tuple[str, int]] = []
        for name, reading in open_ones.items():
            orders += make_orders(reading.context, plan.plans[name], reading.columns, reading.wanted)
            asked += [(name, number) for number in sorted(reading.wanted)]
        names = [f"task {number} of source {name}" for name, number in asked]
        done = run_watched(engine, watch, [order.to_json() for order in orders], names.__getitem__)
        by_source: dict[str, dict[int, ReadReport]] = {}
        for (name, number), report in zip(asked, done, strict=True):
            by_source.setdefault(name, {})[number] = ReadReport.from_json(report)
        for name, told in by_source.items():
            readings[name].take(told)
    else:
        raise SchemaError(f"the tasks of epoch {_epoch(contexts)} do not agree on the types of their columns")
    produced = Produced()
    reports_in_order: list[ReadReport] = []
    for reading in readings.values():
        reports = [reading.reports[n] for n in sorted(reading.reports)]
        found = collect(reading.context, reading.columns, reports)
        _judge(found, reading.context)
        produced.add(found)
        reports_in_order += reports
    return produced, reports_in_order


def exchanged(reports: Sequence[ReadReport], contexts: Mapping[str, Context]) -> dict[str, Exchanged]:
    """Return the rows that the sources passed on to operators, by edge."""
    names = {edge.name for context in contexts.values() for edge in context.edges}
    return {name: Exchanged.collect(({"exchanged": report.exchanged} for report in reports), name) for name in names}


def _judge(produced: Produced, context: Context) -> None:
    """Refuse a slice of mostly bad records: the format is probably wrong."""
    limit = context.options.max_bad_ratio
    bad = produced.bad.total()
    if produced.records >= JUDGED_RECORDS and bad > limit * produced.records:
        raise BadRecordsError(
            f"{bad} of {produced.records} records are bad ({dict(produced.bad)}); max_bad_ratio is {limit}"
        )


def _epoch(contexts: Mapping[str, Context]) -> int:
    return next(iter(contexts.values())).epoch
