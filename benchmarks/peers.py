"""The peer: Spark Structured Streaming with delta-spark, as a careful user would run it."""

from __future__ import annotations

import os
import shutil
import sys
from pathlib import Path
from typing import Any

from firnline.clock import monotonic

DELTA = "io.delta:delta-spark_4.2_2.13:4.4.0"


def open_spark(*, trial: bool = False) -> Any:
    """One session with Delta, on all cores, as such a job would have it; the JVM of a trial starts faster."""
    os.environ["PYSPARK_PYTHON"] = sys.executable
    from pyspark.sql import SparkSession

    builder: Any = SparkSession.builder
    return (
        builder.master("local[*]")
        .appName("structured streaming peer")
        .config("spark.jars.packages", DELTA)
        .config("spark.sql.extensions", "io.delta.sql.DeltaSparkSessionExtension")
        .config("spark.sql.catalog.spark_catalog", "org.apache.spark.sql.delta.catalog.DeltaCatalog")
        .config("spark.ui.enabled", "false")
        .config("spark.ui.showConsoleProgress", "false")
        .config("spark.log.level", "ERROR")
        .config("spark.driver.memory", "4g")
        .config("spark.driver.extraJavaOptions", "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC" if trial else "")
        .config("spark.driver.bindAddress", "127.0.0.1")
        .config("spark.driver.host", "127.0.0.1")
        .config("spark.sql.shuffle.partitions", "2")
        .getOrCreate()
    )


def stream(spark: Any, source: Path, work: Path, schema: Any, *, max_files: int = 1000) -> float:
    """Ingest a folder with Trigger.AvailableNow into a new Delta table; returns seconds."""
    shutil.rmtree(work, ignore_errors=True)
    began = monotonic()
    query = (
        spark.readStream.schema(schema)
        .option("maxFilesPerTrigger", max_files)
        .json(str(source))
        .writeStream.format("delta")
        .option("checkpointLocation", str(work / "checkpoint"))
        .trigger(availableNow=True)
        .start(str(work / "table"))
    )
    query.awaitTermination()
    return monotonic() - began
