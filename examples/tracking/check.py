"""Compares the tables with DuckDB queries over all input: many epochs must give the same rows as one query."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

import duckdb
from deltalake import DeltaTable

SENSORS = {
    "radar": "track as object, epoch_ms(t_ms) as moment",
    "link": "id as object, time::timestamp as moment",
    "optical": "target as object, epoch_ms(round(seen * 1000)::bigint) as moment",
}
# A step is a moment with a report. For each object and step: the sensors that reported in the window that ends there,
# and the earliest of their reports. Consecutive qualifying steps, less than a window apart, are one alert.
ALERTS = """
    with counted as (
        select distinct object, moment,
            count(distinct sensor) over recent as sensors, min(moment) over recent as earliest
        from seen
        window recent as (
            partition by object order by moment
            range between to_microseconds({window_us} - 1) preceding and current row
        )
    ),
    steps as (
        select *, sensors >= {min_inputs} as qualifies,
            coalesce(
                lag(sensors) over later < {min_inputs}
                or moment - lag(moment) over later >= to_microseconds({window_us}),
                true
            ) as breaks
        from counted
        window later as (partition by object order by moment)
    ),
    numbered as (
        select *, sum(breaks::int) over (partition by object order by moment) as number from steps where qualifies
    ),
    found as (
        select object, arg_min(earliest, moment) as alert_start, max(moment) as alert_end
        from numbered group by object, number
    )
    select f.object, f.alert_start, f.alert_end, list_sort(list(distinct s.sensor)), count(*)
    from found f join seen s on s.object = f.object and s.moment between f.alert_start and f.alert_end
    group by all
"""

Rows = set[tuple[Any, ...]]


def expected_alerts(database: duckdb.DuckDBPyConnection, window_seconds: int = 30, min_inputs: int = 2) -> Rows:
    """Return all alerts in the table `seen (object, moment, sensor)`: object, start, end, sensors, rows."""
    query = ALERTS.format(window_us=window_seconds * 1_000_000, min_inputs=min_inputs)
    return {(*row[:3], tuple(row[3]), row[4]) for row in database.execute(query).fetchall()}


def read_table(database: duckdb.DuckDBPyConnection, table: Path, columns: str) -> list[tuple[Any, ...]]:
    """Return rows of a Delta table. delta-rs reads the log, DuckDB reads the files."""
    files = DeltaTable(str(table)).file_uris()
    query = f"select {columns} from read_parquet(?)"  # noqa: S608  # the columns are ours
    return database.execute(query, [files]).fetchall() if files else []


def read_alerts(database: duckdb.DuckDBPyConnection, table: Path) -> Rows:
    """Return the alerts in the table, with the names of the sensors. Fails if an alert is there twice."""
    columns = "object, make_timestamp(epoch_us(alert_start)), make_timestamp(epoch_us(alert_end)), inputs, rows"
    found = [
        (*row[:3], tuple(sorted(name.removeprefix("by_") for name in row[3])), row[4])
        for row in read_table(database, table, columns)
    ]
    assert len({row[:2] for row in found}) == len(found), "an alert is in the table more than once"
    return set(found)


def load_input(database: duckdb.DuckDBPyConnection, folder: Path) -> None:
    """Read all files into the table `seen`."""
    database.execute("create table seen (object varchar, moment timestamp, sensor varchar)")
    for sensor, columns in SENSORS.items():
        files = str(folder / sensor / "*.ndjson")
        query = f"insert into seen select {columns}, '{sensor}' from read_json(?)"  # noqa: S608  # as above
        database.execute(query, [files])


def compare(folder: Path) -> dict[str, tuple[int, int, int]]:
    """Return three counts per table: its rows, the expected rows, and the rows that only one of both has."""
    with duckdb.connect() as database:
        load_input(database, folder / "in")
        pairs = {"alerts": (read_alerts(database, folder / "out" / "alerts"), expected_alerts(database))}
        windows = "sensor, make_timestamp(epoch_us(window_start)), make_timestamp(epoch_us(window_end)), reports"
        found = read_table(database, folder / "out" / "traffic", windows)
        late = read_table(database, folder / "out" / "late", 'sensor, make_timestamp(epoch_us("at"))')
        database.execute("create table late (sensor varchar, moment timestamp)")
        if late:
            database.executemany("insert into late values (?, ?)", late)
        counted = """
            select sensor, time_bucket(interval 10 seconds, moment) as start, start + interval 10 seconds,
                sum(n)::bigint
            from (select sensor, moment, 1 as n from seen union all select sensor, moment, -1 from late)
            group by sensor, start having start + interval 10 seconds <= ? and sum(n) > 0
        """
        closed = max((row[2] for row in found), default=None)
        expected = database.execute(counted, [closed]).fetchall() if closed else []
        pairs["traffic"] = (set(found), set(expected))
        return {name: (len(a), len(b), len(a ^ b)) for name, (a, b) in pairs.items()}


def main() -> int:
    """Say how the tables compare; 1 when they differ."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path, nargs="?", default=Path(__file__).parent, help="where `in` and `out` are")
    differ = 0
    for name, (found, expected, apart) in compare(parser.parse_args().folder).items():
        print(f"{name}: {found:,} rows, expected {expected:,}, {apart:,} differ")
        differ += apart
    return 1 if differ else 0


if __name__ == "__main__":
    sys.exit(main())
