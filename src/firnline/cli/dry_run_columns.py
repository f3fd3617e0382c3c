"""The columns that sources, operators and tables have or would get, found without running anything."""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import pyarrow as pa

from firnline.errors import ConfigError, SchemaError, SinkError
from firnline.graph import find_source, sink_input, topological
from firnline.jobs.dataflow import dataflow_of
from firnline.jobs.read_job import PortContext, columns_of, staged_schema
from firnline.jobs.spark import SparkEngine
from firnline.ndjson import Choice, choose, shown_path
from firnline.operators.base import MAIN
from firnline.options import OperatorOptions, PipelineOptions, SinkOptions, SourceOptions
from firnline.run.open_pipeline import OpenPipeline
from firnline.schema import RESCUED_COLUMN, type_to_text
from firnline.sinks.base import Head, Sink
from firnline.sources.base import Sample, Source, SourcePlan, port_name
from firnline.sources.columns import Columns, agree, columns_from_json, declared


@dataclass(slots=True)
class SampleTotals:
    """What was read of all sources, and what is noteworthy about it."""

    files: int = 0
    records: int = 0
    bad: int = 0
    rescued: int = 0  # records with a value or a field that goes to `_rescued_data`
    warnings: list[str] = field(default_factory=list)

    def to_json(self) -> dict[str, int]:
        return {"files": self.files, "records": self.records, "bad": self.bad, "rescued": self.rescued}

    def add(self, sample: Sample) -> None:
        self.files += sample.files
        self.records += sample.records
        self.bad += sample.bad
        self.rescued += sample.rescued
        self.warnings += sample.warnings


@dataclass(frozen=True, slots=True)
class Sampled:
    """The columns that the rows of a port will have, as far as the sample tells, and how new ones were inferred."""

    columns: Columns
    schema: pa.Schema
    choices: dict[str, Choice] = field(default_factory=dict)  # by path


def sample_source(
    source: Source, ports: Sequence[PortContext], plan: SourcePlan, totals: SampleTotals
) -> dict[str, Sampled]:
    """Decode the beginning of what a plan takes first, and merge its columns with those that are known, by port.

    As in a run, the sample is read again until the types of new columns are chosen. Empty: the source gives no sample.

    Raises:
        SchemaError: a record does not fit, and the spec says that this stops the epoch.
    """
    columns = {one.port: columns_of(one, plan.constants) for one in ports}
    choices: dict[str, dict[str, Choice]] = {one.port: {} for one in ports}  # by port and path
    while True:
        sample = source.sample(plan, columns)
        if sample is None:
            return {}
        is_retyped = False
        for port, read in ((port, read) for port, read in sample.columns.items() if port in columns):
            columns[port], again = agree(columns[port], [read])
            is_retyped = is_retyped or bool(again)
            counts: dict[str, Counter[str]] = {
                path: Counter(count) for path, count in read.kinds.items() if path not in choices[port]
            }
            chosen = {path: choose(path, count) for path, count in counts.items()}
            kinds = columns[port].kinds
            choices[port] |= {path: choice for path, choice in chosen.items() if choice.kind == kinds.get(path)}
        if not is_retyped:
            break
    totals.add(sample)
    for of_port in choices.values():
        totals.warnings += [_odd_warning(path, choice) for path, choice in of_port.items() if choice.odd]
    return {
        port_name(source.name, one.port): Sampled(
            columns[one.port], staged_schema(one, columns[one.port]), choices[one.port]
        )
        for one in ports
        if one.port in sample.columns
    }


def _odd_warning(path: str, choice: Choice) -> str:
    share = 100 * choice.odd / choice.values
    return (
        f"{shown_path(path)}: of {choice.values:,} sampled values, {choice.odd:,} ({share:.2g} %) would not fit "
        f"{choice.kind} and would go to {RESCUED_COLUMN}; to choose another type, declare it under schema.fields"
    )


ANY_TIME = "2000-01-01T00:00:00+00:00"  # columns do not depend on the epoch's time


def sinks_of(pipeline: OpenPipeline, port: str) -> list[Sink]:
    """The sinks that take what comes out of a source, an operator or a port."""
    return [pipeline.sink(s.name) for s in pipeline.options.sinks if sink_input(pipeline.options, s) == port]


def wanted_ports(options: PipelineOptions) -> dict[str, tuple[SourceOptions, str]]:
    """Return the ports of sources that a run reads, by the names that sinks and operators use."""
    wanted = dataflow_of(options).wanted_ports
    return {port_name(source.name, port): (source, port) for source in options.sources for port in wanted[source.name]}


def known_columns(pipeline: OpenPipeline, head: Head, port: str) -> pa.Schema | None:
    """The columns that a port of a source is known to have: the checkpoint's, or those of a table that takes its
    rows."""
    stored = columns_from_json(head.checkpoint.columns) if head.checkpoint else {}
    if port in stored:
        return stored[port]
    return next((table for sink in sinks_of(pipeline, port) if (table := _find_table(sink)) is not None), None)


def source_schemas(pipeline: OpenPipeline, head: Head, sampled: Mapping[str, Sampled]) -> dict[str, pa.Schema]:
    """The columns of every port of a source of which something is known: read, stored or declared."""
    schemas: dict[str, pa.Schema] = {}
    for name, (source, port) in wanted_ports(pipeline.options).items():
        schema = sampled[name].schema if name in sampled else known_columns(pipeline, head, name)
        if schema is None and source.schema_of(port).fields:
            schema = declared(source, port)
        if schema is not None:
            schemas[name] = schema
    return schemas


def operator_schemas(options: PipelineOptions, known: Mapping[str, pa.Schema]) -> dict[str, pa.Schema]:
    """The columns of every operator and port whose inputs are known. Only a query starts Spark.

    Args:
        options: The pipeline.
        known: The columns of its sources.

    Raises:
        ConfigError: an operator does not fit what it reads.
    """
    from firnline.operators.loading import build_operator

    schemas = dict(known)
    with contextlib.closing(_Queries(options)) as queries:
        for operator in topological(options):
            if any(text not in schemas for text in operator.inputs):
                continue
            inputs = {text: schemas[text] for text in operator.inputs}
            if operator.is_sql:
                schemas[operator.name] = queries.schema_of(operator, inputs)
                continue
            built = build_operator(operator, inputs, options.operator_paths)
            for port in built.ports:
                schemas[operator.name if port == MAIN else f"{operator.name}.{port}"] = built.output_schema(port)
    return {name: schema for name, schema in schemas.items() if name not in known}


class _Queries:
    """Asks Spark which columns queries give; the session starts with the first one."""

    def __init__(self, options: PipelineOptions) -> None:
        self._engine = SparkEngine(options.name, options.spark)

    def schema_of(self, operator: OperatorOptions, inputs: Mapping[str, pa.Schema]) -> pa.Schema:
        from firnline.jobs.spark_sql import query_schema
        from firnline.sql import bind_epoch_time, bind_tables

        views = {text: f"firnline_input_{number}" for number, text in enumerate(inputs)}
        query = bind_tables(bind_epoch_time(str(operator.settings["query"]), ANY_TIME), views)
        tables = {views[text]: schema for text, schema in inputs.items()}
        session = self._engine.session
        try:
            return query_schema(session, tables, {}, query)
        except ConfigError as error:
            raise ConfigError(f'operator "{operator.name}": {error.message}', hint=error.hint) from error

    def close(self) -> None:
        self._engine.stop()


def _find_table(sink: Sink) -> pa.Schema | None:
    """The columns of a sink's table; nothing is known of an optional one that cannot be read."""
    try:
        return sink.find_schema()
    except (SinkError, OSError):
        if sink.required:
            raise
        return None


def check_tables(pipeline: OpenPipeline, schemas: Mapping[str, pa.Schema]) -> None:
    """Raise SchemaError when a table cannot take the rows that would be written to it."""
    for options in pipeline.options.sinks:
        sink, rows = pipeline.sink(options.name), schemas.get(sink_input(pipeline.options, options))
        if rows is not None:
            _check_upsert(options, rows)
            if _find_table(sink) is not None:
                sink.check_columns(rows)


def _check_upsert(options: SinkOptions, rows: pa.Schema) -> None:
    """Check that the rows have the columns that an upsert needs."""
    if options.write != "upsert":
        return
    order = getattr(options, "sequence_by", None)
    for setting, name in (*(("key", name) for name in options.key), *([("sequence_by", order)] if order else [])):
        if name not in rows.names:
            raise SchemaError(
                f"sink {options.name!r}: the {setting} column {name!r} is not among the columns {rows.names}",
                hint=f"Set the sink's {setting} to columns that its input has.",
                column=name,
            )


def schema_rows(
    pipeline: OpenPipeline, sampled: Mapping[str, Sampled], schemas: Mapping[str, pa.Schema]
) -> list[dict[str, str | float]]:
    """The columns of the deciding table, where each comes from, and what share of sampled values does not fit."""
    deciding = pipeline.options.deciding
    port = sink_input(pipeline.options, deciding)
    table = pipeline.deciding.find_schema()
    rows = schemas.get(port)
    schema = table if rows is None else pipeline.deciding.columns_of(rows)
    if schema is None:
        return []
    existing = set(table.names) if table is not None else set()
    source = find_source(pipeline.options, port)
    spec = set(declared(*source).names) if source is not None else set()
    folders = set(sampled[port].columns.constants) if port in sampled else set()
    choices = sampled[port].choices if port in sampled else {}
    facts: list[dict[str, str | float]] = []
    for column in schema:
        choice = choices.get(column.name)
        odd = choice.odd / choice.values if choice else 0.0
        origin = "table" if column.name in existing else "declared" if column.name in spec else "new"
        if origin == "new" and column.name in folders:
            origin = "new, from a folder name"
        facts.append({"name": column.name, "type": type_words(column), "origin": origin, "odd_share": odd})
    return facts


def type_words(field: pa.Field) -> str:
    """A column's type as a spec writes it."""
    try:
        return type_to_text(field)
    except ValueError:  # a type that only another writer makes
        return str(field.type)
