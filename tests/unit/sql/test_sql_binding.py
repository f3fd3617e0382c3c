"""What is filled in before Spark gets a query: the epoch's time and the views it reads."""

from __future__ import annotations

import subprocess
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from firnline.sql import bind_epoch_time, bind_tables

NOON = "2026-11-16T12:00:00.000001+00:00"
LITERAL = "TIMESTAMP '2026-11-16T12:00:00.000001Z'"


@pytest.mark.parametrize(
    ("query", "bound"),
    [
        ("SELECT epoch_time() AS t FROM a", f"SELECT {LITERAL} AS t FROM a"),
        ("SELECT Epoch_Time ( ) AS t", f"SELECT {LITERAL} AS t"),
        ("SELECT `epoch_time`() AS t", f"SELECT {LITERAL} AS t"),
        ("SELECT epoch_time(), date(epoch_time())", f"SELECT {LITERAL}, date({LITERAL})"),
        ("SELECT 'epoch_time()' -- epoch_time()\n, epoch_time", "SELECT 'epoch_time()' -- epoch_time()\n, epoch_time"),
        ("SELECT 'ä€𝄞', epoch_time() AS t", f"SELECT 'ä€𝄞', {LITERAL} AS t"),
    ],
)
def test_epoch_time_becomes_a_literal_and_the_rest_stays_as_written(query: str, bound: str) -> None:
    assert bind_epoch_time(query, NOON) == bound


@pytest.mark.parametrize(
    ("written", "literal"),
    [
        ("2026-11-16T12:00:00Z", "2026-11-16T12:00:00.000000Z"),
        ("2026-11-16T14:30:00.5+02:30", "2026-11-16T12:00:00.500000Z"),
    ],
)
def test_the_time_is_written_in_utc_to_the_microsecond(written: str, literal: str) -> None:
    assert bind_epoch_time("SELECT epoch_time() AS t", written) == f"SELECT TIMESTAMP '{literal}' AS t"


def test_a_time_without_a_zone_is_refused() -> None:
    with pytest.raises(ValueError, match="has no zone"):
        bind_epoch_time("SELECT epoch_time() AS t", "2026-11-16T12:00:00")


@pytest.mark.parametrize(
    ("query", "bound"),
    [
        ("SELECT orders.a FROM orders", "SELECT orders.a FROM `v1` AS `orders`"),
        ("SELECT o.a FROM Orders AS o", "SELECT o.a FROM `v1` AS o"),
        ("SELECT * FROM orders o JOIN totals.late", "SELECT * FROM `v1` o JOIN `v2` AS `late`"),
        ("SELECT * FROM `totals.late` AS l", "SELECT * FROM `v2` AS l"),
        ("SELECT * FROM `my-orders`", "SELECT * FROM `v``3` AS `my-orders`"),
        ("WITH s AS (SELECT orders FROM orders) SELECT * FROM s, range(3)",
         "WITH s AS (SELECT orders FROM `v1` AS `orders`) SELECT * FROM s, range(3)"),
        ("SELECT window(ts, '1 hour') FROM orders PIVOT (max(x) FOR k IN ('a'))",
         "SELECT window(ts, '1 hour') FROM `v1` AS `orders` PIVOT (max(x) FOR k IN ('a'))"),
        ("SELECT a FROM t WHERE a IN (SELECT a /* orders */ FROM orders)",
         "SELECT a FROM t WHERE a IN (SELECT a /* orders */ FROM `v1` AS `orders`)"),
    ],
)  # fmt: skip
def test_inputs_become_views_and_the_rest_stays_as_written(query: str, bound: str) -> None:
    assert bind_tables(query, {"orders": "v1", "totals.late": "v2", "my-orders": "v`3"}) == bound


@given(st.lists(st.sampled_from(["epoch_time", "(", ")", "a", "'x'", ",", "SELECT", "`b`", " "]), max_size=12))
def test_a_query_without_the_call_is_not_touched(words: list[str]) -> None:
    query = " ".join(words)
    if "epoch_time (" not in " ".join(query.split()):
        assert bind_epoch_time(query, NOON) == query


def test_the_parser_is_loaded_with_the_first_query_only() -> None:
    program = """
import sys
import firnline.sql, firnline.graph, firnline.spec.loading
assert "sqlglot" not in sys.modules
firnline.sql.check_query("SELECT 1", [])
assert "sqlglot" in sys.modules
"""
    subprocess.run([sys.executable, "-c", program], check=True)
