"""The peers of stateful pipelines: Structured Streaming on RocksDB, as a careful user would run it."""

from __future__ import annotations

import importlib.util
from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

ROCKSDB = "org.apache.spark.sql.execution.streaming.state.RocksDBStateStoreProvider"
COLUMNS = "k string, n long, s long"
SETTINGS = {
    "spark.sql.streaming.stateStore.providerClass": ROCKSDB,
    "spark.sql.shuffle.partitions": "2",
    "spark.databricks.delta.snapshotPartitions": "2",  # 50 tasks for a small log would be most of a micro-batch
}


def can_transform() -> bool:
    """Whether `transformWithState` works here: in Python it needs the package protobuf, which Spark does not bring."""
    return importlib.util.find_spec("google") is not None and importlib.util.find_spec("google.protobuf") is not None


class Stream(ABC):
    """Count and sum per key as a streaming query that goes on from its checkpoint whenever it is run.

    One file a micro-batch; the keys that changed are appended to a Delta table, as Firnline does.
    """

    def __init__(self, spark: Any, source: Path, work: Path) -> None:
        self._spark = spark
        self._source = source
        self._work = work

    def run(self) -> list[float]:
        """Run until the input is exhausted; returns the seconds of every micro-batch but the first."""
        with _settings(self._spark):
            rows = self._spark.readStream.schema("k string, v long").option("maxFilesPerTrigger", 1)
            writer = self._write(rows.json(str(self._source)))
            writer = writer.option("checkpointLocation", str(self._work / "checkpoint"))
            query = writer.trigger(availableNow=True).start()
            query.awaitTermination()
        took = [batch["durationMs"]["triggerExecution"] / 1000 for batch in query.recentProgress]
        return took[1:]

    @property
    def table(self) -> Path:
        return self._work / "table"

    @abstractmethod
    def _write(self, rows: Any) -> Any:
        """The streaming query over the rows, to be started."""


class BuiltIn(Stream):
    """`groupBy().agg()` in update mode. Delta takes no updates from a stream, so each micro-batch is appended."""

    def _write(self, rows: Any) -> Any:
        from pyspark.sql import functions as f

        table = str(self.table)

        def append(frame: Any, batch: int) -> None:
            frame.write.format("delta").mode("append").option("txnAppId", "peer").option("txnVersion", batch).save(
                table
            )

        totals = rows.groupBy("k").agg(f.count("*").alias("n"), f.sum("v").alias("s"))
        return totals.writeStream.outputMode("update").foreachBatch(append)


class Transform(Stream):
    """`transformWithState` in Python, on rows: with few rows per key it is faster than its pandas form."""

    def _write(self, rows: Any) -> Any:
        totals = rows.groupBy("k").transformWithState(_row_processor(), COLUMNS, "Append", "None")
        return totals.writeStream.format("delta").option("path", str(self.table))


class TransformInPandas(Stream):
    """`transformWithStateInPandas`."""

    def _write(self, rows: Any) -> Any:
        totals = rows.groupBy("k").transformWithStateInPandas(_pandas_processor(), COLUMNS, "Append", "None")
        return totals.writeStream.format("delta").option("path", str(self.table))


# The classes are made in functions, so that they travel to workers by value.


def _row_processor() -> Any:
    from pyspark.sql import Row
    from pyspark.sql.streaming.stateful_processor import StatefulProcessor

    class Totals(StatefulProcessor):
        def init(self, handle: Any) -> None:
            self._state = handle.getValueState("totals", "n long, s long")

        def handleInputRows(self, key: Any, rows: Any, timerValues: Any) -> Iterator[Any]:  # noqa: N802, N803
            n, s = self._state.get() or (0, 0)
            for row in rows:
                n, s = n + 1, s + row["v"]
            self._state.update((n, s))
            yield Row(k=key[0], n=n, s=s)

        def close(self) -> None:
            pass

    return Totals()


def _pandas_processor() -> Any:
    import pandas
    from pyspark.sql.streaming.stateful_processor import StatefulProcessor

    class Totals(StatefulProcessor):
        def init(self, handle: Any) -> None:
            self._state = handle.getValueState("totals", "n long, s long")

        def handleInputRows(self, key: Any, rows: Any, timerValues: Any) -> Iterator[Any]:  # noqa: N802, N803
            n, s = self._state.get() or (0, 0)
            for frame in rows:
                n, s = n + len(frame), s + int(frame["v"].sum())
            self._state.update((n, s))
            yield pandas.DataFrame({"k": [key[0]], "n": [n], "s": [s]})

        def close(self) -> None:
            pass

    return Totals()


@contextmanager
def _settings(spark: Any) -> Iterator[None]:
    """The state store that holds more than memory does, few tasks, and no word of the workers on the terminal."""
    system = spark._jvm.java.lang.System
    shown = system.err
    before = {key: spark.conf.get(key, None) for key in SETTINGS}
    for key, value in SETTINGS.items():
        spark.conf.set(key, value)
    system.setErr(spark._jvm.java.io.PrintStream(spark._jvm.java.io.OutputStream.nullOutputStream()))
    try:
        yield
    finally:
        system.setErr(shown)
        for key, value in before.items():
            if value is None:
                spark.conf.unset(key)
            else:
                spark.conf.set(key, value)
