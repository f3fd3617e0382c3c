"""The columns that sources, operators and tables have or would get, found without running anything."""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

import pyarrow as pa

from firnline.errors import BadRecordsError, ConfigError, SchemaError, SinkError
from firnline.graph import decided_input, find_source, operator_ports, sink_input, topological
from firnline.jobs.dataflow import dataflow_of
from firnline.jobs.read_job import (
    PortContext,
    Widening,
    check_bad_ratio,
    check_fields,
    columns_of,
    decide_widening,
    staged_schema,
    widen_columns,
)
from firnline.jobs.spark import SparkEngine
from firnline.operators.base import MAIN
from firnline.options import FollowerOptions, OperatorOptions, PipelineOptions, SinkOptions, SourceOptions
from firnline.rescued import UNKNOWN_FIELDS, Rescued, add_rescued
from firnline.run.open_pipeline import OpenPipeline
from firnline.schema import RESCUED_COLUMN, type_to_text, widen, wider_columns
from firnline.sinks.base import Head, Sink
from firnline.sinks.delta.options import DeltaPartsOptions, DeltaSinkOptions
from firnline.sinks.delta.upsert.changes import check_key, check_named, check_sequence
from firnline.sinks.shaping import RowShape, check_settings, find_unknown_columns
from firnline.sources.base import Sample, Source, SourcePlan, port_name
from firnline.sources.columns import Columns, agree, columns_from_json, declared


@dataclass(slots=True)
class SampleTotals:
    """What was read of all sources, and what is noteworthy about it."""

    files: int = 0
    records: int = 0
    bad: int = 0
    rescued: int = 0  # records with a value or a field that goes to `_rescued_data`
    size_bytes: int = 0
    complete: bool = True  # whether every waiting record was read
    first_epoch_complete: bool = True  # whether every record of the first epoch was read
    warnings: list[str] = field(default_factory=list)
    _paths: set[str] = field(default_factory=set)

    def to_json(self) -> dict[str, int | bool]:
        return {
            "files": self.files,
            "records": self.records,
            "size_bytes": self.size_bytes,
            "complete": self.complete,
            "first_epoch_complete": self.first_epoch_complete,
            "bad": self.bad,
            "rescued": self.rescued,
        }

    def add(self, sample: Sample) -> None:
        self.files += len(sample.paths - self._paths) if sample.paths else sample.files
        self._paths |= sample.paths
        self.records += sample.records
        self.bad += sum(sample.bad.values())
        self.rescued += sample.rescued
        self.size_bytes += sample.size_bytes
        self.complete = self.complete and sample.complete
        self.warnings += sample.warnings


@dataclass(frozen=True, slots=True)
class Sampled:
    """The columns that the rows of a port will have, as far as the sample tells, and how new ones were inferred."""

    columns: Columns
    schema: pa.Schema
    widened: dict[str, str] = field(default_factory=dict)  # columns that the run would widen: their present types
    odd: Counter[str] = field(default_factory=Counter)  # by column: sampled values that would be rescued
    values: Counter[str] = field(default_factory=Counter)  # by column: sampled values that fit


def sample_source(
    source: Source, ports: Sequence[PortContext], plan: SourcePlan, later: SourcePlan | None, totals: SampleTotals
) -> dict[str, Sampled]:
    """Decode a sample of the first epoch, and one of the files after it; return the columns by port.

    The types of new columns follow from the first epoch, as in a run; the sample of the later files tells which of
    their values would be rescued. Empty: the source gives no sample.

    Raises:
        SchemaError, BadRecordsError: a record does not fit, and the spec says that this stops the epoch.
    """
    first = _sample_epoch(source, ports, plan, totals, "")
    totals.first_epoch_complete = totals.first_epoch_complete and totals.complete
    if not first or later is None:
        return first
    following = [replace(one, base=first[name].schema) for one in ports if (name := _name(source, one)) in first]
    rest = _sample_epoch(source, following, later, totals, " of later epochs")
    for name, sampled in rest.items():
        first[name].odd.update(sampled.odd)
        first[name].values.update(sampled.values)
        for column in sampled.schema:
            if column.name not in first[name].schema.names:
                totals.warnings.append(f"later files add the column {column.name} ({type_words(column)})")
    return first


def _name(source: Source, context: PortContext) -> str:
    return port_name(source.name, context.port)


def _sample_epoch(
    source: Source, ports: Sequence[PortContext], plan: SourcePlan, totals: SampleTotals, which: str
) -> dict[str, Sampled]:
    """Decode a sample of one slice. As in a run, it is read again until the types of its columns are chosen."""
    columns = {one.port: columns_of(one, plan.constants) for one in ports}
    widened: dict[str, dict[str, str]] = {one.port: {} for one in ports}
    kept: dict[str, dict[str, str]] = {one.port: {} for one in ports}
    while True:
        sample = source.sample(plan, columns)
        if sample is None:
            return {}
        if sample.records > min(split.max_records for split in plan.splits):
            sample = replace(sample, complete=False)  # the epoch ends before the end of its files
        is_retyped = False
        for port, read in ((port, read) for port, read in sample.columns.items() if port in columns):
            columns[port], again = agree(columns[port], [read])
            is_retyped = is_retyped or bool(again)
        if is_retyped:
            continue
        for context in ports:
            port, old = context.port, columns[context.port]
            widening = _widening(context, old, sample, {*widened[port], *kept[port]}, totals)
            kept[port] |= widening.kept
            if widening.types:
                widened[port] |= {name: type_words(old.decoded.field(name)) for name in widening.types}
                columns[port] = widen_columns(context, old, widening.types)
                is_retyped = True
        if not is_retyped:
            break
    totals.add(sample)
    _check_bad_ratio(sample, ports[0].source.max_bad_ratio, totals)
    found: dict[str, Sampled] = {}
    for context in ports:
        port = context.port
        if port in sample.columns:
            if sample.records > sum(sample.bad.values()):
                partitions = {name for target in context.output.targets for name in target["partition_by"]}
                check_fields(source.location, staged_schema(context, columns[port]), partitions)
            sampled = _sampled(context, sample, columns[port], widened[port])
            totals.warnings += _type_warnings(sampled, sample, port, kept[port], which)
            found[_name(source, context)] = sampled
    return found


def _sampled(context: PortContext, sample: Sample, columns: Columns, widened: dict[str, str]) -> Sampled:
    rescued = add_rescued(one for one in sample.rescued_values if one.source == context.port)
    return Sampled(
        columns,
        staged_schema(context, columns),
        widened,
        Counter({one.column: one.values for one in rescued}),
        Counter(sample.values.get(context.port, {})),
    )


def _type_warnings(sampled: Sampled, sample: Sample, port: str, kept: Mapping[str, str], which: str) -> list[str]:
    """Return a warning for every column with values that would be rescued, and for every one that would be widened."""
    columns = sampled.columns
    rescued = add_rescued(one for one in sample.rescued_values if one.source == port)
    warnings = [_rescued_warning(one, sample, kept, columns.frozen, which) for one in rescued if one.values]
    for name, old in sampled.widened.items():
        new = type_words(columns.decoded.field(name))
        warnings.append(f"column {name}{which}: {old} would become {new}, and the run would rewrite the table's files")
    return warnings


def _widening(
    context: PortContext, columns: Columns, sample: Sample, known: set[str], totals: SampleTotals
) -> Widening:
    """Decide like a run which columns get wider types. A sample that is not complete only warns of a failure."""
    rescued = add_rescued(one for one in sample.rescued_values if one.source == context.port)
    try:
        return decide_widening(context, columns, rescued, sample.records - sum(sample.bad.values()), known)
    except SchemaError as error:
        if sample.complete:
            raise
        totals.warnings.append(f"on_widen is fail, and a run may stop: {error.message}")
        return Widening(kept={one.column: "on_widen is fail" for one in rescued})


def _check_bad_ratio(sample: Sample, limit: float, totals: SampleTotals) -> None:
    try:
        check_bad_ratio(Counter(sample.bad), sample.records, limit, sample.first_bad)
    except BadRecordsError as error:
        if sample.complete:
            raise
        totals.warnings.append(f"a run may stop: of the sample, {error.message}")


def _rescued_warning(one: Rescued, sample: Sample, kept: Mapping[str, str], frozen: frozenset[str], which: str) -> str:
    values = one.values + sample.values.get(one.source, {}).get(one.column, 0)
    share = f" of {values:,} sampled values ({100 * one.values / values:.2g} %)" if one.column != UNKNOWN_FIELDS else ""
    what = "unknown fields" if one.column == UNKNOWN_FIELDS else one.column
    expected = f" would not fit {one.expected} and" if one.expected else ""
    first = f"; first: {one.file} line {one.line}: {one.first}" if one.file and one.line is not None else ""
    reason = f"; the type stays: {kept[one.column]}" if one.column in kept else ""
    if one.column != UNKNOWN_FIELDS and frozen.isdisjoint({one.column, one.column.split(".")[0]}):
        reason = "; to choose another type, declare it under schema.fields"
    return f"{what}{which}: {one.values:,}{share}{expected} would go to {RESCUED_COLUMN}{first}{reason}"


ANY_TIME = "2000-01-01T00:00:00+00:00"  # columns do not depend on the epoch's time


def sinks_of(pipeline: OpenPipeline, port: str) -> list[Sink]:
    """The sinks that take what comes out of a source, an operator or a port."""
    return [pipeline.sink(s.name) for s in pipeline.options.sinks if sink_input(pipeline.options, s) == port]


def wanted_ports(options: PipelineOptions) -> dict[str, tuple[SourceOptions, str]]:
    """Return the ports of sources that a run reads, by the names that sinks and operators use."""
    wanted = dataflow_of(options).wanted_ports
    return {port_name(source.name, port): (source, port) for source in options.sources for port in wanted[source.name]}


def known_columns(pipeline: OpenPipeline, head: Head, port: str) -> pa.Schema | None:
    """Return the known columns of a port, as a run would find them: those of a table that takes its rows, else the
    checkpoint's; the other way round if an operator reads it."""
    stored = columns_from_json(head.checkpoint.columns).get(port) if head.checkpoint else None
    if stored is not None and port in operator_ports(pipeline.options):
        return stored
    tables = (_find_table(sink) for sink in sinks_of(pipeline, port) if not sink.capabilities.fed_from_outbox)
    return next((table for table in tables if table is not None), stored)


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
    """Raise SchemaError when a table cannot take the rows that would be written to it, or the declared columns."""
    port = find_source(pipeline.options, decided_input(pipeline.options))
    if port is not None and pipeline.deciding.find_schema() is not None:
        pipeline.deciding.check_columns(declared(*port))
    for options in pipeline.options.sinks:
        sink, rows = pipeline.sink(options.name), schemas.get(sink_input(pipeline.options, options))
        if rows is None:
            continue
        if isinstance(options, FollowerOptions):
            check_settings(options, rows)
        _check_upsert(options, rows)
        table = _find_table(sink)
        if table is not None and isinstance(options, FollowerOptions):  # it converts values to the types of its target
            with _naming_sink(options):
                sink.check_columns(delivered(options, rows))
        elif table is not None:
            wider = {name: table.field(name).type for name in wider_columns(table, rows)}
            sink.check_columns(widen(rows, wider))  # the run widens these columns of the table


def delivered(options: SinkOptions, rows: pa.Schema) -> pa.Schema:
    """Return the columns that a sink gets of rows with these columns."""
    return RowShape.of(options).schema_of(rows) if isinstance(options, FollowerOptions) else rows


@contextlib.contextmanager
def _naming_sink(options: SinkOptions) -> Iterator[None]:
    """Name the sink in a SchemaError."""
    try:
        yield
    except SchemaError as error:
        if f"sink {options.name!r}" in error.message:
            raise
        raise SchemaError(f"sink {options.name!r}: {error.message}", hint=error.hint, **error.fields) from error


def unknown_column_warnings(pipeline: OpenPipeline, schemas: Mapping[str, pa.Schema]) -> list[str]:
    """Return a warning for each column that a sink chooses, leaves out or masks, and that its rows lack."""
    return [
        words
        for options in pipeline.options.followers
        if (rows := schemas.get(sink_input(pipeline.options, options))) is not None
        for words in find_unknown_columns(options, rows)
    ]


def _check_upsert(options: SinkOptions, rows: pa.Schema) -> None:
    """Check that the rows have the columns that an upsert needs, of types that it takes."""
    if options.write != "upsert":
        return
    order = getattr(options, "sequence_by", None)
    with _naming_sink(options):
        if isinstance(options, DeltaSinkOptions | DeltaPartsOptions):  # others compare nested values, too
            check_key(options.key, rows)
            if order is not None:
                check_sequence(order, rows)
        for setting, names in (("key", options.key), ("sequence_by", (order,) if order else ())):
            for name in names:
                check_named(setting, name, rows)


def schema_rows(
    pipeline: OpenPipeline, name: str, sampled: Mapping[str, Sampled], schemas: Mapping[str, pa.Schema]
) -> list[dict[str, str | float | None]]:
    """The columns of a sink's table, where each comes from, and what share of sampled values does not fit."""
    sink = pipeline.sink(name)
    options = next(options for options in pipeline.options.sinks if options.name == name)
    port = sink_input(pipeline.options, options)
    table = _find_table(sink)
    rows = schemas.get(port)
    schema = table if rows is None else sink.columns_of(delivered(options, rows))
    if schema is None:
        return []
    existing = set(table.names) if table is not None else set()
    source = find_source(pipeline.options, port)
    spec = set(declared(*source).names) if source is not None else set()
    folders = set(sampled[port].columns.constants) if port in sampled else set()
    found = sampled.get(port)
    facts: list[dict[str, str | float | None]] = []
    for column in schema:
        odd = _odd_share(found, column.name) if found else 0.0
        origin = "table" if column.name in existing else "declared" if column.name in spec else "new"
        if origin == "new" and column.name in folders:
            origin = "new, from a folder name"
        facts.append(
            {
                "name": column.name,
                "type": type_words(column),
                "origin": origin,
                "odd_share": odd,
                "widened_from": found.widened.get(column.name) if found else None,
            }
        )
    return facts


def _odd_share(sampled: Sampled, name: str) -> float:
    """Return the share of a column's sampled values that would be rescued, those of its nested fields included."""
    odd = sum(count for path, count in sampled.odd.items() if path == name or path.startswith(f"{name}."))
    return odd / (odd + sampled.values[name]) if odd else 0.0


def declared_warnings(pipeline: OpenPipeline, head: Head) -> list[str]:
    """Return a warning for each declared column to which the table, or the checkpoint, gives another type."""
    warnings = []
    for name, (source, port) in wanted_ports(pipeline.options).items():
        known = known_columns(pipeline, head, name)
        for column in declared(source, port):
            index = known.get_field_index(column.name) if known is not None else -1
            if known is None or index < 0 or known.field(index).type == column.type:
                continue
            warnings.append(
                f"column {column.name} is declared as {type_words(column)}, but the table has "
                f"{type_words(known.field(index))}: a run keeps the type of the table, and rescues what does not fit"
            )
    return warnings


def partition_warnings(pipeline: OpenPipeline, sampled: Mapping[str, Sampled]) -> list[str]:
    """Return a warning for each partition column that no sampled record has."""
    warnings = []
    for port, found in sampled.items():
        for sink in sinks_of(pipeline, port):
            for name in sink.stage_target()["partition_by"]:
                if name not in found.columns.constants and not found.values[name]:
                    warnings.append(
                        f"no sampled record has {name}, by which {sink.name} is partitioned: all rows would go to one "
                        "partition"
                    )
    return warnings


def type_words(field: pa.Field) -> str:
    """A column's type as a spec writes it."""
    try:
        return type_to_text(field)
    except ValueError:  # a type that only another writer makes
        return str(field.type)
