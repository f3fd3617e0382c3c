"""Runs a query of an epoch on Spark: Catalyst reads the rows of earlier jobs, and the usual writers write the
result."""

from __future__ import annotations

import contextlib
import json
import logging
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pyarrow as pa

from firnline.errors import ConfigError, SchemaError, StagingError, error_report, rebuild_error
from firnline.jobs.engine import SqlJob, SqlTable, SqlTask
from firnline.jobs.spark import first_line, freeze_imports
from firnline.schema import schema_from_json, schema_to_json
from firnline.types import Json

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

    from firnline.sinks.base import Stager


def run_sql(session: SparkSession, job: SqlJob) -> tuple[pa.Schema, list[dict[str, Json]]]:
    """Run a query. Returns the columns of its rows and the reports of the tasks that wrote them, in order."""
    with _views(session, job.tables, job.views):
        frame = _analyse(session, job.query)
        schema = plain_schema(frame)
        written = frame.mapInArrow(_writer_of(job.task, schema), "report string")
        reports = [json.loads(row.report) for row in _collect(written)]
    for report in reports:
        if "error" in report:
            raise rebuild_error(report["error"])
    return schema, sorted(reports, key=lambda report: int(report["task"]))


def query_schema(session: SparkSession, inputs: dict[str, pa.Schema], views: dict[str, str], query: str) -> pa.Schema:
    """Return the columns of a query's result for inputs with these columns, without running it."""
    with _views(session, {name: SqlTable(schema) for name, schema in inputs.items()}, views):
        return plain_schema(_analyse(session, query))


@contextlib.contextmanager
def _views(session: SparkSession, tables: Mapping[str, SqlTable], views: Mapping[str, str]) -> Iterator[None]:
    """Register the inputs of a query under their names while it runs."""
    named: list[str] = []
    try:
        for name, table in tables.items():
            _frame(session, table).createOrReplaceTempView(name)
            named.append(name)
        for name, query in views.items():
            _analyse(session, query).createOrReplaceTempView(name)
            named.append(name)
        yield
    finally:
        for name in named:
            with contextlib.suppress(Exception):
                session.catalog.dropTempView(name)


def _frame(session: SparkSession, table: SqlTable) -> DataFrame:
    from pyspark.sql.pandas.types import from_arrow_schema

    columns, files = from_arrow_schema(table.schema), len(table.files)
    if not files:
        return session.createDataFrame([], columns)
    return session.range(0, files, 1, files).mapInArrow(_reader_of(table), columns)


def _analyse(session: SparkSession, query: str) -> DataFrame:
    from pyspark.errors import AnalysisException, ParseException

    _silence_traces()
    try:
        return session.sql(query)
    except (AnalysisException, ParseException) as error:
        raise ConfigError(f"the query does not fit its inputs: {first_line(error)}") from error


def _collect(frame: DataFrame) -> list[Any]:
    """Run a frame. If the query fails on a row, raises SchemaError: a retry would not help."""
    try:
        return frame.collect()
    except Exception as error:
        if "SQLSTATE: 22" in str(error):  # data exceptions: a failed cast, a division by zero, an overflow
            raise SchemaError(
                f"a query failed on a row: {first_line(error)}",
                hint="Let the query cope with it: try_cast, try_divide, or a where clause that leaves such rows out.",
            ) from error
        raise


def _silence_traces() -> None:
    """Keep PySpark from writing the JVM's stack trace of a wrong query to stderr; the error has the message."""
    from pyspark.logger import PySparkLogger

    for name in ("SQLQueryContextLogger", "DataFrameQueryContextLogger"):
        PySparkLogger.getLogger(name).setLevel(logging.CRITICAL + 1)


def _reader_of(table: SqlTable) -> Any:
    """Return the worker's function, which reads the file with its number."""
    text = json.dumps(table.to_json())

    def read(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        from firnline.exchange import read_exchange

        freeze_imports()
        table = SqlTable.from_json(json.loads(text))
        for batch in batches:
            for number in batch.column(0).to_pylist():
                yield from read_exchange(table.exchange, [table.files[number]], table.schema)

    return read


def _writer_of(task: SqlTask, schema: pa.Schema) -> Any:
    """Return the worker's function, which stages the rows of its partition and reports."""
    text, columns = json.dumps(task.to_json()), json.dumps(schema_to_json(schema))

    def write(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        import pyarrow
        from pyspark import TaskContext

        from firnline.exchange import ExchangeWriter
        from firnline.jobs.heartbeat import pinging
        from firnline.operators.columns import align
        from firnline.sinks.registry import close_stagers, open_stagers

        freeze_imports()
        context = TaskContext.get()
        number = context.partitionId() if context is not None else 0
        task, wanted = SqlTask.from_json(json.loads(text)), schema_from_json(json.loads(columns))
        ping = replace(task.ping, name=f"{task.ping.name}, {number}")
        stagers: dict[str, Stager] = {}
        exchanges = [ExchangeWriter(edge, task.exchange) for edge in task.output.edges]
        rows = 0
        try:
            stagers |= open_stagers(task.output.targets, task.attempt)
            with pinging(ping):
                for batch in batches:
                    rows += batch.num_rows
                    fitted = align(batch, wanted)
                    for stager in stagers.values():
                        stager.write(fitted)
                    for exchange in exchanges:
                        exchange.write(fitted)
                staged = close_stagers(stagers)
                exchanged = {exchange.edge.name: exchange.close() for exchange in exchanges}
        except StagingError as error:
            for stager in stagers.values():
                stager.discard()
            report = {"task": number, "error": error_report(error)}
        except BaseException:
            for stager in stagers.values():
                stager.discard()
            raise
        else:
            report = {"task": number, "rows": rows, "staged": staged, "exchanged": exchanged}
        yield pyarrow.RecordBatch.from_pydict({"report": [json.dumps(report)]})

    return write


_WIDER = {pa.int8(): pa.int32(), pa.int16(): pa.int32(), pa.large_string(): pa.string()}


def plain_schema(frame: DataFrame) -> pa.Schema:
    """Return the columns of a frame as tables have them: small integers widened, times in UTC.

    Raises:
        SchemaError: a column has a type that no table can hold.
    """
    from pyspark.sql.pandas.types import to_arrow_schema

    fields = []
    for field in to_arrow_schema(frame.schema, timezone="UTC"):
        kind = _WIDER.get(field.type, field.type)
        if pa.types.is_timestamp(kind):
            kind = pa.timestamp("us", "UTC")
        fields.append(pa.field(field.name, kind, True))
    schema = pa.schema(fields)
    try:
        schema_to_json(schema)
    except ValueError as error:
        raise SchemaError(
            f"a query gives a column that no table can hold: {error}", hint="Cast it in the query, e.g. to string."
        ) from error
    return schema
