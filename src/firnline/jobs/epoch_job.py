"""The jobs of one epoch: read every source, run SQL, fold rows into state, in the order of the graph.

Each job passes its rows to the next in exchange files. Nothing is committed here: the jobs write staged files and state
files that no commit names yet.
"""

from __future__ import annotations

import logging
import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime, timedelta
from functools import partial

import pyarrow as pa

from firnline.errors import ConfigError, EngineError, FirnlineError, SourceError, StagingError, WorkerLostError
from firnline.exchange import Exchanged
from firnline.graph import resolve_port, sink_input, upstream
from firnline.jobs.dataflow import Dataflow, keyed_edge, sql_edge
from firnline.jobs.engine import Engine, Output, SqlJob, SqlTable, SqlTask
from firnline.jobs.fold_job import Folded, FoldReport, FoldTask, add_up
from firnline.jobs.heartbeat import React, Watch, WorkerLosses, run_watched
from firnline.jobs.read_job import (
    PortContext,
    Produced,
    ReadContext,
    exchanged,
    known_columns,
    never_widens,
    read_sources,
    refuse_widening,
)
from firnline.jobs.watermarks import Watermark, Watermarks
from firnline.names import (
    commit_exchange_folder,
    epoch_exchange_folder,
    exchange_folder,
    outbox_folder,
    quarantine_folder,
)
from firnline.operators.base import MAIN, Operator
from firnline.operators.loading import build_operator, own_code
from firnline.options import OperatorOptions, PipelineOptions, SourceOptions, names_tables
from firnline.sinks.base import Sink
from firnline.sinks.parking import SHAPE, ParkedSinks, parked_target
from firnline.sources.base import MAIN_PORT, port_name
from firnline.sources.group import EpochPlan, Sources
from firnline.state.home import StateHome
from firnline.state.load import EMPTY, export_digest, load_initial_state
from firnline.state.manifest import OperatorState, Ranges, ShardState, checkpoint_id, rescale
from firnline.storage import LocalStorage, normalise, open_storage
from firnline.types import Json

logger = logging.getLogger(__name__)

_1970 = datetime(1970, 1, 1, tzinfo=UTC)


@dataclass(frozen=True, slots=True, eq=False)
class EpochJob:
    """An epoch to run: as planned or, to catch up on state, as recorded in the ledger."""

    epoch: int
    attempt: str
    epoch_time: str
    plan: EpochPlan
    columns: Mapping[str, pa.Schema]  # of each port of a source before this epoch, as far as known
    state: Mapping[str, OperatorState] = field(default_factory=dict)  # of each operator before this epoch
    watermarks: Watermarks = field(default_factory=Watermarks)  # before this epoch
    ranges: Ranges = ()  # the key groups of each shard; none without stateful operators
    before_last_fold: Callable[[EpochResult], None] | None = None  # selects the operators to snapshot
    skip: frozenset[str] = frozenset()  # operators whose state already includes this epoch
    columns_after: Mapping[str, pa.Schema] = field(default_factory=dict)  # in a replay: `columns` after this epoch
    recorded: Watermarks | None = None  # in a replay: those after this epoch
    # In a replay: by sink, where its rows are staged. A replay for the state of operators stages nothing.
    targets: Mapping[str, dict[str, Json]] = field(default_factory=dict)
    initial: Mapping[str, str] = field(default_factory=dict)  # in a replay: exported states that operators started with
    is_wanted: Callable[[], bool] = lambda: True
    on_worker_lost: React | None = None  # decides about a lost worker; None: the epoch runs again
    run_began: datetime | None = None  # the idle time of inputs counts from here on; None: no input is idle

    @property
    def replay(self) -> bool:
        """Whether the epoch is already committed: its state is rebuilt, or its rows for some sinks."""
        return self.recorded is not None


@dataclass(slots=True)
class EpochResult:
    """What the jobs of an epoch produced."""

    produced: Produced
    state: dict[str, OperatorState]
    watermarks: Watermarks
    operators: dict[str, Folded] = field(default_factory=dict)  # what each stateful operator did
    due: frozenset[str] = frozenset()  # operators to snapshot after this epoch
    snapshots: dict[str, Json] = field(default_factory=dict)  # references, once a snapshot of the state is complete
    built: dict[str, Operator] = field(default_factory=dict)  # operators with known columns
    initial: dict[str, str] = field(default_factory=dict)  # digests of exported states that operators started with


class EpochJobs:
    """Runs epoch jobs, one at a time. `sinks` gives the staging targets; nothing is committed here."""

    def __init__(
        self,
        options: PipelineOptions,
        sources: Sources,
        sinks: Sequence[Sink],
        engine: Engine,
        flow: Dataflow,
        home: StateHome,
        losses: WorkerLosses,
    ) -> None:
        self.options = options
        self.sources = sources
        self.sinks = sinks
        self.engine = engine
        self.flow = flow
        self.home = home
        self._losses = losses
        self.parked = ParkedSinks()  # the optional sinks whose stagers failed
        self._shapes: dict[str, Json] = {}  # of the targets, by sink
        self._partitions: set[tuple[str, str]] = set()  # sinks and partition columns about which the run knows enough

    def run(self, job: EpochJob) -> EpochResult:
        """Run an epoch.

        Raises:
            EngineError: Spark failed; repeating is safe.
            StagingError: the stager of a sink failed. A repeated epoch parks the rows for that sink if it is optional.
            FirnlineError: an error that a task raised.
        """
        folder = self.folder(epoch_exchange_folder(self.options.name, job.attempt))
        state = {name: rescale(before, job.ranges) for name, before in job.state.items()}
        running = _Running(self, job, self._watch(job.attempt, folder), state)
        try:
            if job.replay:
                return running.run()
            with self._losses.watching(job.epoch, job.is_wanted, job.on_worker_lost or self._replace_worker):
                result = running.run()
            self._check_partitions(job.epoch, result.produced)
            return result
        except StagingError as error:
            if error.fields.get("optional"):
                self.parked.add(str(error.fields["sink"]))
            raise
        finally:
            self._sweep(folder)

    def _check_partitions(self, epoch: int, produced: Produced) -> None:
        """Warn, once per run, of a partition column that no record has."""
        for (sink, name), has_value in produced.partitions.items():
            if not has_value and (sink, name) not in self._partitions:
                logger.warning(
                    "no record has %s, by which %s is partitioned: all rows go to one partition; correct partition_by",
                    name, sink, extra={"epoch": epoch},
                )  # fmt: skip
            self._partitions.add((sink, name))

    def target_of(self, sink: Sink) -> dict[str, Json]:
        """Describe to tasks where to stage the rows for a sink; they are parked if its stager or the sink fails."""
        if sink.name not in self.parked:
            try:
                target = sink.stage_target()
                self._shapes[sink.name] = target.get(SHAPE)
                return target
            except FirnlineError as error:
                if sink.required:
                    raise
                logger.warning("sink not asked where to stage", extra={"sink": sink.name, "reason": error.message})
                self.parked.add(sink.name)
        options = next(one for one in self.options.sinks if one.name == sink.name)
        partition_by = getattr(options, "partition_by", ())
        outbox = self.folder(outbox_folder(self.options.name))
        return parked_target(sink.name, partition_by, outbox, self._shapes.get(sink.name))

    def _replace_worker(self, _: WorkerLostError) -> dict[str, Json]:
        """Rerun the epoch on the remaining workers, for a pipeline without state."""
        shards = self.options.state.shards or min(self.engine.parallelism, self.flow.key_groups)
        return {"choice": "replace", "shards": shards, "shards_before": shards}

    def run_tasks(self, attempt: str, tasks: list[dict[str, Json]]) -> list[dict[str, Json]]:
        """Run the tasks that a sink needs during a commit. Raises the errors of `run`."""
        folder = self.folder(commit_exchange_folder(self.options.name, attempt))
        try:
            watch = self._watch(attempt, folder)
            return run_watched(self.engine, watch, tasks, lambda number: f"task {number} of a commit")
        finally:
            self._sweep(folder)

    def _watch(self, attempt: str, folder: dict[str, Json]) -> Watch:
        return Watch(attempt, folder, self.options.state.worker_ping_secs, self.options.batch.job_timeout_secs)

    def folder(self, key: str) -> dict[str, Json]:
        """Return a folder of the pipeline in its home, which every worker reaches, as plain JSON."""
        home = self.options.home
        return {"root": normalise(home.root), "storage_options": dict(home.storage_options), "folder": key}

    def sweep_all(self) -> None:
        """Delete exchanged rows and heartbeats of killed runs. A run that still writes them is fenced."""
        self._sweep(self.folder(exchange_folder(self.options.name)))

    def _sweep(self, folder: dict[str, Json]) -> None:
        """Delete an attempt's exchanged rows and heartbeats. After a kill, the next run deletes them."""
        storage = open_storage(folder["root"], folder["storage_options"])
        if isinstance(storage, LocalStorage):
            shutil.rmtree(storage.path_of(folder["folder"]), ignore_errors=True)
            return
        if not self.flow.operators:  # nothing was exchanged, and an object store has no heartbeats
            return
        for stat in list(storage.list(folder["folder"])):
            storage.delete(stat.name.removeprefix(f"{storage.root}/"))


@dataclass(slots=True)
class _Running:
    """One epoch on its way through the graph."""

    jobs: EpochJobs
    job: EpochJob
    watch: Watch
    state: dict[str, OperatorState]
    edges: dict[str, Exchanged] = field(default_factory=dict)  # exchanged rows, by edge
    columns: dict[str, pa.Schema] = field(default_factory=dict)  # the columns of each port
    views: dict[str, str] = field(default_factory=dict)  # SQL operators that only SQL reads

    @property
    def exchange(self) -> dict[str, Json]:
        """The folder for rows between jobs."""
        return dict(self.watch.folder)

    def run(self) -> EpochResult:
        """Run every job of the epoch, in the order of the graph."""
        flow = self.jobs.flow
        contexts = self._contexts()
        produced, reports = read_sources(self.jobs.engine, self.job.plan, contexts, self.watch)
        self.edges = exchanged(reports, contexts)
        for port in (port for context in contexts.values() for port in context.ports.values()):
            name = port_name(port.source.name, port.port)
            columns = produced.columns.get(name) or known_columns(port)
            if columns is not None:
                self.columns[name] = columns
                for target in port.output.targets:  # a query whose source gave no rows still gets its columns
                    produced.schemas.setdefault(target["sink"], columns)
        result = EpochResult(produced, self.state, self.job.watermarks)
        last = flow.stateful[-1].name if flow.stateful else ""
        for operator in flow.operators:
            if flow.stateful and not self.job.is_wanted():
                raise EngineError(f"epoch {self.job.epoch} was dropped while it ran")
            if operator.is_sql:
                self._run_sql(operator, produced)
            else:
                self._fold(operator, result, finish=operator.name == last)
        if not self.job.replay:
            for sink in self.jobs.sinks:
                produced.staged.setdefault(sink.name, [])
        return result

    def _contexts(self) -> dict[str, ReadContext]:
        job = self.job
        return {
            source.name: ReadContext(
                epoch=job.epoch,
                attempt=job.attempt,
                options=source,
                settings=self.jobs.sources[source.name].reader_settings(),
                ports={port: self._port_context(source, port) for port in self.jobs.flow.wanted_ports[source.name]},
                quarantine=self.jobs.folder(quarantine_folder(self.jobs.options.name)),
                exchange=self.exchange,
                replay=job.replay,
            )
            for source in self.jobs.options.sources
        }

    def _port_context(self, source: SourceOptions, port: str) -> PortContext:
        name = port_name(source.name, port)
        refuse = partial(self._refuse_widening, name)
        upserts = [
            sink
            for sink in self.jobs.options.sinks
            if sink.write == "upsert" and sink_input(self.jobs.options, sink) == name
        ]
        keys = tuple(dict.fromkeys(column for sink in upserts for column in sink.key))
        strict = {column: how for sink in upserts for column, how in sink.strict_columns.items()}
        before, after = self.job.columns.get(name), self.job.columns_after.get(name)
        may_widen = not never_widens(self._sinks_of(name), *self._deciding_and_operators(name))
        table_key = self._find_table_key(source, port) if any(not sink.key for sink in upserts) else ()
        return PortContext(source, port, self._output(name), before, refuse, after, keys, strict, may_widen, table_key)

    def _find_table_key(self, source: SourceOptions, port: str) -> tuple[str, ...]:
        """Return the key of a captured table, which its source remembers; nothing if it cannot say: then the sinks that
        need the key say so."""
        opened = self.jobs.sources[source.name]
        if not opened.has_keys or port == MAIN_PORT or names_tables(port):
            return ()
        try:
            return opened.find_key(port) or ()
        except (ConfigError, SourceError):
            return ()

    def _refuse_widening(self, port: str, types: Mapping[str, pa.DataType]) -> dict[str, str]:
        return refuse_widening(types, self._sinks_of(port), *self._deciding_and_operators(port))

    def _deciding_and_operators(self, port: str) -> tuple[str, bool]:
        """Return the name of the deciding sink, and whether operators read a port."""
        return self.jobs.sinks[0].name, bool(self.jobs.flow.edges_of(port, self.job.ranges))

    def _output(self, port: str) -> Output:
        """Return the destinations of a port's rows."""
        given = self.job.targets
        targets = [given[sink.name] if self.job.replay else self.jobs.target_of(sink) for sink in self._sinks_of(port)]
        edges = self.jobs.flow.edges_of(port, self.job.ranges)
        if given:  # only queries read the rows: every stateful operator is left out
            edges = [edge for edge in edges if edge.name == sql_edge(port)]
        return Output(tuple(targets), tuple(edges))

    def _sinks_of(self, port: str) -> list[Sink]:
        """Return the sinks that take the rows of a port; in a replay, those with a target."""
        sinks = {sink.name: sink for sink in self.jobs.sinks if not self.job.replay or sink.name in self.job.targets}
        return [sinks[name] for name in self.jobs.flow.sinks_of(port) if name in sinks]

    # -- SQL ------------------------------------------------------------------------------------------

    def _run_sql(self, operator: OperatorOptions, produced: Produced) -> None:
        """Run a query for a sink or a stateful operator. A query that only SQL reads becomes a view there."""
        from firnline.sql import bind_epoch_time, bind_tables  # imports a parser that most pipelines do not need

        flow = self.jobs.flow
        named = {port: view_name(port, self.job.attempt) for port in operator.inputs}
        query = bind_epoch_time(str(operator.settings["query"]), self.job.epoch_time)
        self.views[operator.name] = bind_tables(query, named)
        output = self._output(operator.name)
        output = replace(output, edges=tuple(edge for edge in output.edges if edge.ranges))
        if not output.targets and not output.edges:
            return
        inputs, above = flow.inputs_of_query(operator), flow.queries_above(operator)
        if not self._can_query(operator, inputs):
            return
        job = SqlJob(
            tables={view_name(port, self.job.attempt): self._table(port) for port in inputs},
            views={view_name(n, self.job.attempt): self.views[n] for n in self.views if n in above},
            query=self.views[operator.name],
            task=SqlTask(
                self.job.attempt,
                output,
                self.exchange,
                self.watch.ping(f"a task of query {operator.name}"),
            ),
        )
        with self.watch.job(self.jobs.engine.cancel):
            schema, reports = self.jobs.engine.run_sql(self.watch.tag, job, self.watch.timeout_seconds)
        self._take_output(operator.name, schema, reports, produced)

    def _can_query(self, operator: OperatorOptions, inputs: Sequence[str]) -> bool:
        """Return whether the columns of all inputs are known. Otherwise no input may have rows, or they would be
        lost."""
        unknown = [port for port in inputs if port not in self.columns]
        if unknown and any(self.edges.get(sql_edge(port), Exchanged()).rows for port in inputs):
            raise ConfigError(
                f"operator {operator.name!r} reads {unknown[0]!r}, whose columns are unknown",
                hint="Declare the columns of its sources under schema.fields; then they are known at once.",
            )
        return not unknown

    def _table(self, port: str) -> SqlTable:
        """Return the rows of a port as input of a query."""
        files = self.edges.get(sql_edge(port), Exchanged()).files
        return SqlTable(self.columns[port], self.exchange, tuple(files))

    # -- state ----------------------------------------------------------------------------------------

    def _fold(self, options: OperatorOptions, result: EpochResult, *, finish: bool) -> None:
        """Fold the rows for one operator into its state, one task per shard."""
        if options.name in self.job.skip:
            return
        job, pipeline = self.job, self.jobs.options
        before = job.watermarks.of(options.name)
        inputs = {port: self.edges.get(keyed_edge(options.name, port), Exchanged()) for port in options.inputs}
        latest = {port: rows.latest for port, rows in inputs.items() if rows.latest is not None}
        operator = self._build(options)
        quiet = frozenset(port for port, rows in inputs.items() if not rows.rows)
        after = self._watermark(options, operator, before, latest, quiet)
        result.watermarks = result.watermarks.set(options.name, after)
        if operator is not None:
            result.built[options.name] = operator
        if finish and job.before_last_fold is not None:
            job.before_last_fold(result)
        listed = result.due if finish else frozenset[str]()
        ports = {port: self._output(port) for port in self.jobs.flow.ports_of(options)}
        state = result.state.get(options.name) or self._first_state(options, operator, result)
        shards = {(first, last): shard for first, last, shard in state.shards}
        others = {name: result.state.get(name) or OperatorState(0) for name in listed if name != options.name}
        common = FoldTask(
            pipeline=pipeline.name,
            epoch=job.epoch,
            attempt=job.attempt,
            epoch_time=job.epoch_time,
            operator=options,
            code=own_code(options, pipeline.operator_paths),
            files={port: exchanged.files for port, exchanged in inputs.items()},
            schemas=operator.inputs if operator is not None else None,
            unordered=tuple(o.name for o in self.jobs.flow.operators if o.is_sql and o.name in options.inputs),
            exchange=self.exchange,
            home=self.jobs.home,
            folder=checkpoint_id(job.epoch, job.attempt),
            key_groups=self.jobs.flow.key_groups,
            late_before=before.at,
            watermark=after.at,
            ports=ports,
            shard=0,
            groups=(0, 0),
            state=ShardState(),
            is_listed=options.name in listed,
        )
        tasks = [
            replace(
                common,
                shard=number,
                groups=groups,
                state=shards.get(groups, ShardState()),
                # All operators have the same ranges, except one whose state is still empty.
                others={n: o.shards[number][2] if o.shards else ShardState() for n, o in others.items()}
                if listed
                else None,
            )
            for number, groups in enumerate(job.ranges)
        ]
        watch = replace(self.watch, timeout_seconds=pipeline.checkpoint.timeout_ms / 1000)
        name = options.name
        reports = run_watched(
            self.jobs.engine,
            watch,
            [task.to_json() for task in tasks],
            lambda shard: f"shard {shard} of operator {name}",
        )
        folded = add_up([FoldReport.from_json(report) for report in reports], job.ranges, job.epoch)
        result.operators[options.name] = folded
        if operator is not None or options.name in result.state:
            result.state = {**result.state, options.name: folded.state}
        if operator is not None:
            for port in ports:
                schema = operator.output_schema(resolve_port(port, [options.name])[1] or MAIN)
                self._take_output(port, schema, reports, result.produced)
        logger.debug("folded", extra={"operator": options.name, "rows": folded.rows, "pipeline": pipeline.name})

    def _watermark(
        self,
        options: OperatorOptions,
        operator: Operator | None,
        before: Watermark,
        latest: Mapping[str, int],
        quiet: frozenset[str],
    ) -> Watermark:
        """Return the watermark after this epoch's rows; on a replay, the recorded one."""
        if self.job.recorded is not None:
            return self.job.recorded.of(options.name)
        if operator is None:
            return before
        unheard = frozenset(port for port in options.inputs if self._is_left_out(port))
        new = any(port not in before.inputs for port in options.inputs)
        noted = self._note_silence(options, before, quiet & before.inputs.keys(), unheard)
        return noted.advance(latest, operator.delay_us, hold=bool(unheard) and new)

    def _is_left_out(self, port: str) -> bool:
        """Return whether a source of a port's rows did not answer when the epoch was planned."""
        left_out = self.job.plan.left_out
        if not left_out:
            return False
        options = self.jobs.options
        source, _ = resolve_port(port, self.jobs.sources.names)
        return source in left_out or any(node.name in left_out for node in upstream(options, port))

    def _note_silence(
        self, options: OperatorOptions, before: Watermark, quiet: frozenset[str], unheard: frozenset[str]
    ) -> Watermark:
        """Update which inputs are idle, by the epoch's own time; recorded with the watermark."""
        if options.idle_after is None or self.job.run_began is None:
            return replace(before, silent={}, idle=frozenset())
        now = datetime.fromisoformat(self.job.epoch_time)
        after = before.note_silence(
            quiet, unheard, _micros(now), _micros(self.job.run_began), options.idle_after // timedelta(microseconds=1)
        )
        for port in sorted(after.idle ^ before.idle):
            what = "an input is idle" if port in after.idle else "an idle input speaks again"
            logger.warning(what, extra={"operator": options.name, "input": port, "epoch": self.job.epoch})
        return after

    def _first_state(self, options: OperatorOptions, operator: Operator | None, result: EpochResult) -> OperatorState:
        """Return the first state of an operator without one: empty, or the one that the spec names.

        A replay starts as the operator did, whatever the spec says now.
        """
        path, job = options.initial_state, self.job
        if operator is None or path in ("", EMPTY) or (job.replay and options.name not in job.initial):
            return OperatorState(0)
        result.initial[options.name] = export_digest(path)
        folder = checkpoint_id(job.epoch, job.attempt)
        return load_initial_state(
            operator, path, self.jobs.home, folder, job.ranges, self.jobs.flow.key_groups, job.epoch
        )

    def _build(self, options: OperatorOptions) -> Operator | None:
        """Build the operator for the current columns of its inputs; None while no input has any."""
        known = {port: self.columns[port] for port in options.inputs if port in self.columns}
        if not known:
            return None
        first = next(iter(known.values()))
        wanted = [*options.keys, options.settings.get("time")]
        alike = pa.schema([field for field in first if field.name in wanted])  # an input that never had a row
        inputs = {port: known.get(port, alike) for port in options.inputs}
        operator = build_operator(options, inputs, self.jobs.options.operator_paths)
        _check_settings(options, operator)
        return operator

    def _take_output(self, port: str, schema: pa.Schema, reports: list[dict[str, Json]], produced: Produced) -> None:
        """Collect the output of a query's or an operator's tasks at a port."""
        self.columns[port] = schema
        for edge in self.jobs.flow.edges_of(port, self.job.ranges):
            self.edges[edge.name] = Exchanged.collect(reports, edge.name)
        for sink in self._sinks_of(port):
            files = [file for report in reports for file in report["staged"][sink.name]]
            produced.stage({sink.name: files}, {sink.name: _columns_of(sink, schema)})


def _columns_of(sink: Sink, rows: pa.Schema) -> pa.Schema:
    """Return the sink's columns for rows; the columns of the rows if an optional sink cannot tell."""
    try:
        return sink.columns_of(rows)
    except FirnlineError as error:
        if sink.required:
            raise
        logger.warning("sink not asked for its columns", extra={"sink": sink.name, "reason": error.message})
        return rows


def _micros(time: datetime) -> int:
    return (time - _1970) // timedelta(microseconds=1)


def _check_settings(options: OperatorOptions, operator: Operator) -> None:
    """Check that an operator's keys and times match the spec, because rows are partitioned before it is built."""
    time = options.settings.get("time")
    times = dict.fromkeys(options.inputs, time) if time else {}
    if operator.keys != options.keys:
        wanted, declared = list(operator.keys), list(options.keys)
        raise ConfigError(f"operator {options.name!r} has the keys {wanted}, its settings say keys: {declared}")
    if dict(operator.times) != times:
        raise ConfigError(
            f"operator {options.name!r} takes times from {dict(operator.times)}, but its settings say time: {time}",
            hint="Name one column, the same in all inputs, under time in its settings, and return it for every input.",
        )


def view_name(port: str, attempt: str) -> str:
    """Return the view name for the rows of a port, in a form that Spark accepts."""
    return f"firnline_{attempt}_{port.encode().hex()}"
