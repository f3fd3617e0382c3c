"""Other readers of a table: Spark with Delta's own reader, DuckDB and delta-rs see the same types and values."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import duckdb
import pytest
from deltalake import DeltaTable

from tests.support.pipelines import pipeline_options, run_to_end

ROOT = Path(__file__).parents[2]

READ = """
import json, sys
from benchmarks.peers import open_spark

spark = open_spark(trial=True)
spark.conf.set("spark.sql.session.timeZone", "UTC")
table = spark.read.format("delta").load(sys.argv[1])
rows = table.selectExpr("id", "price", "cast(at as string) at").orderBy("id").collect()
print(json.dumps({"types": dict(table.dtypes), "rows": [list(row) for row in rows]}))
"""


@pytest.mark.spark
def test_spark_duckdb_and_delta_rs_read_a_widened_column_and_time_stamps(tmp_path: Path) -> None:
    folder, table = tmp_path / "in", tmp_path / "out"
    folder.mkdir()
    options = pipeline_options(str(folder), str(table))
    for number, price in enumerate(["1", "2.5"], 1):
        line = f'{{"id": {number}, "price": {price}, "at": "2024-05-01T12:30:0{number}.5+02:00"}}\n'
        (folder / f"{number}.json").write_text(line)
        run_to_end(options)
    expected = [[1, 1.0, "2024-05-01 10:30:01.5"], [2, 2.5, "2024-05-01 10:30:02.5"]]

    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT / "src"), str(ROOT)])}
    command = [sys.executable, "-c", READ, str(table)]
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-4000:]
    spark = json.loads(done.stdout.splitlines()[-1])
    assert spark == {"types": {"id": "bigint", "price": "double", "at": "timestamp"}, "rows": expected}

    delta = DeltaTable(str(table))
    rows = delta.to_pyarrow_table().sort_by("id").to_pylist()
    assert [[row["id"], row["price"], f"{row['at']:%Y-%m-%d %H:%M:%S.%f}"[:21]] for row in rows] == expected
    with duckdb.connect() as connection:
        connection.execute("SET TimeZone = 'UTC'")
        query = """SELECT id, price, strftime("at", '%Y-%m-%d %H:%M:%S.%g') FROM read_parquet($files) ORDER BY id"""
        found = connection.execute(query, {"files": delta.file_uris()}).fetchall()
    assert [[number, price, at[:21]] for number, price, at in found] == expected
