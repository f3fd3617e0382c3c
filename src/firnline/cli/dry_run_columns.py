"""Which columns sources, operators and tables have or would get, found out without running anything."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping

import pyarrow as pa

from firnline.cli.sampling import Sampled
from firnline.errors import ConfigError, SinkError
from firnline.graph import sink_input, topological
from firnline.jobs.spark import SparkEngine
from firnline.operators.base import MAIN
from firnline.options import OperatorOptions, PipelineOptions
from firnline.run.open_pipeline import OpenPipeline
from firnline.schema import type_to_text
from firnline.sinks.base import Head, Sink
from firnline.sources.columns import columns_from_json, declared

ANY_TIME = "2000-01-01T00:00:00+00:00"  # columns do not depend on the epoch's time


def sinks_of(pipeline: OpenPipeline, port: str) -> list[Sink]:
    """The sinks that take what comes out of a source, an operator or a port."""
    return [pipeline.sink(s.name) for s in pipeline.options.sinks if sink_input(pipeline.options, s) == port]


def known_columns(pipeline: OpenPipeline, held: Head, source: str) -> pa.Schema | None:
    """The columns that a source is known to have: the checkpoint's, or those of a table that takes its rows."""
    stored = columns_from_json(held.checkpoint.columns) if held.checkpoint else {}
    if source in stored:
        return stored[source]
    return next((table for sink in sinks_of(pipeline, source) if (table := _find_table(sink)) is not None), None)


def source_schemas(pipeline: OpenPipeline, held: Head, sampled: Mapping[str, Sampled]) -> dict[str, pa.Schema]:
    """The columns of every source of which something is known: read, stored or declared."""
    found: dict[str, pa.Schema] = {}
    for options in pipeline.options.sources:
        schema = (
            sampled[options.name].schema if options.name in sampled else known_columns(pipeline, held, options.name)
        )
        if schema is None and options.schema.fields:
            schema = declared(options)
        if schema is not None:
            found[options.name] = schema
    return found


def operator_schemas(options: PipelineOptions, known: Mapping[str, pa.Schema]) -> dict[str, pa.Schema]:
    """The columns of every operator and port whose inputs are known. Only a query starts Spark.

    Args:
        options: The pipeline.
        known: The columns of its sources.

    Raises:
        ConfigError: an operator does not fit what it reads.
    """
    from firnline.operators.loading import build_operator

    found = dict(known)
    with contextlib.closing(_Queries(options)) as queries:
        for operator in topological(options):
            if any(text not in found for text in operator.inputs):
                continue
            inputs = {text: found[text] for text in operator.inputs}
            if operator.is_sql:
                found[operator.name] = queries.schema_of(operator, inputs)
                continue
            built = build_operator(operator, inputs, options.operator_paths)
            for port in built.ports:
                found[operator.name if port == MAIN else f"{operator.name}.{port}"] = built.output_schema(port)
    return {name: schema for name, schema in found.items() if name not in known}


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
    """Raise SchemaError when a table that is there cannot take the rows that would be written to it."""
    for options in pipeline.options.sinks:
        sink, rows = pipeline.sink(options.name), schemas.get(sink_input(pipeline.options, options))
        if rows is not None and _find_table(sink) is not None:
            sink.check_columns(rows)


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
    held = set(table.names) if table is not None else set()
    spec = {name for source in pipeline.options.sources if source.name == port for name in declared(source).names}
    folders = set(sampled[port].columns.constants) if port in sampled else set()
    choices = sampled[port].choices if port in sampled else {}
    found: list[dict[str, str | float]] = []
    for field in schema:
        choice = choices.get(field.name)
        odd = choice.odd / choice.values if choice else 0.0
        origin = "table" if field.name in held else "declared" if field.name in spec else "new"
        if origin == "new" and field.name in folders:
            origin = "new, from a folder name"
        found.append({"name": field.name, "type": type_words(field), "origin": origin, "odd_share": odd})
    return found


def type_words(field: pa.Field) -> str:
    """A column's type as a spec writes it."""
    try:
        return type_to_text(field)
    except ValueError:  # a type that only another writer makes
        return str(field.type)
