"""`dry-run` of SQL operators: Spark tells their columns."""

from __future__ import annotations

import json

import pytest

from firnline.cli.main import run_command

pytestmark = pytest.mark.spark

SPEC = """\
name: shop
sources:
  my-orders:
    path: in
    schema: {fields: [{name: at, type: timestamp}]}
operators:
  - name: clean
    type: sql
    inputs: [my-orders]
    query: |
      SELECT id, CAST(amount AS DECIMAL(10,2)) AS amount, at, epoch_time() AS seen_at
      FROM `my-orders`
      WHERE at < epoch_time()
  - name: totals
    type: aggregate
    inputs: [clean]
    keys: [id]
    aggregates: [{name: total, function: sum, column: amount}]
    time: at
    window: {size: 10m}
  - name: late
    type: sql
    inputs: [totals.late, clean]
    query: SELECT l.id, count(*) AS n FROM totals.late AS l JOIN clean ON clean.id = l.id GROUP BY l.id
sinks:
  - {table: out/totals, input: totals}
  - {table: out/late, input: late}
spark: {spark.master: "local[1]"}
"""


def test_spark_tells_the_columns_of_queries(
    tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    tmp_path = tmp_path_factory.mktemp("spec")  # the JVM begins here, and lives on in other tests: the folder must, too
    (tmp_path / "in").mkdir()
    (tmp_path / "in" / "a.json").write_text('{"id": 1, "amount": 2.5, "at": "2026-11-16T12:00:00Z"}\n')
    (tmp_path / "firnline.yml").write_text(SPEC)
    monkeypatch.chdir(tmp_path)
    assert run_command(["dry-run", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    columns = {s["name"]: [(c["name"], c["type"]) for c in s["columns"]] for s in found["schemas"]}
    assert columns["clean"] == [
        ("id", "int64"),
        ("amount", "decimal(10,2)"),
        ("at", "timestamp"),
        ("seen_at", "timestamp"),
    ]
    assert ("total", "decimal(38,2)") in columns["totals"]
    assert columns["late"] == [("id", "int64"), ("n", "int64")]
    assert not (tmp_path / "out").exists()

    (tmp_path / "firnline.yml").write_text(SPEC.replace("SELECT id, CAST", "SELECT idd, CAST"))
    assert run_command(["dry-run"]) == 2
    error, hint = capsys.readouterr().err.splitlines()
    assert error.startswith('Error: operator "clean": the query does not fit its inputs')
    assert "idd" in error
    assert hint.startswith("Try: ")
