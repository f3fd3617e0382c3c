"""Counts what a Delta table holds with DuckDB, and what files hold line by line: readers other than our own."""

from __future__ import annotations

import gzip
from collections.abc import Iterator
from typing import Any, cast

from firnline.storage import Storage

_BOM = b"\xef\xbb\xbf"


def active_files(table: str) -> list[str]:
    """The Parquet files that the newest version of a table names."""
    from deltalake import DeltaTable

    return list(DeltaTable(table).file_uris())


def count_ids(table: str, inputs: list[str]) -> dict[str, int]:
    """Compare ids of JSON files with ids of a table: records_in, records_out, distinct_ids, lost, doubled."""
    import duckdb

    files = active_files(table)
    with duckdb.connect() as connection:
        connection.execute("SET enable_progress_bar = false")
        connection.execute(
            """CREATE TABLE went_in AS
               SELECT id FROM read_json(?, columns = {'id': 'BIGINT'}, format = 'newline_delimited')""",
            [inputs],
        )
        connection.execute("CREATE TABLE came_out AS SELECT id FROM read_parquet(?)", [files])
        row = connection.execute(
            """SELECT (SELECT count(*) FROM went_in), (SELECT count(*) FROM came_out),
                      (SELECT count(DISTINCT id) FROM came_out),
                      (SELECT count(*) FROM went_in WHERE id NOT IN (SELECT id FROM came_out WHERE id IS NOT NULL))"""
        ).fetchone()
    records_in, records_out, distinct, lost = cast("tuple[int, int, int, int]", row)
    return {
        "records_in": records_in,
        "records_out": records_out,
        "distinct_ids": distinct,
        "lost": lost,
        "doubled": records_out - distinct,
    }


def count_by_file(table: str) -> dict[str, tuple[int, int]]:
    """Rows and distinct record numbers of each source file, from the lineage columns of a table."""
    import duckdb

    files = active_files(table)
    if not files:
        return {}
    with duckdb.connect() as connection:
        connection.execute("SET enable_progress_bar = false")
        rows = connection.execute(
            """SELECT _firnline_file, count(*), count(DISTINCT _firnline_record)
               FROM read_parquet(?, union_by_name = true) GROUP BY 1""",
            [files],
        ).fetchall()
    return {str(path): (int(count), int(distinct)) for path, count, distinct in rows}


def compare_rows(table: str, expected: str) -> dict[str, int]:
    """Compare two tables row by row: rows, expected, lost (missing in `table`), doubled (there and not expected).

    Floating-point numbers are compared to nine digits: sums depend on the order of their rows.
    """
    import duckdb
    from deltalake import DeltaTable

    found = [uri for uri in (table, expected) if DeltaTable.is_deltatable(uri)]
    if not found:
        return {"rows": 0, "expected": 0, "lost": 0, "doubled": 0}
    with duckdb.connect() as connection:
        connection.execute("SET enable_progress_bar = false")
        for name, uri in (("came_out", table), ("wanted", expected)):
            rows = DeltaTable(uri if uri in found else found[0]).to_pyarrow_dataset()
            connection.register(name, rows if uri in found else rows.schema.empty_table())
        columns = connection.execute("DESCRIBE wanted").fetchall()
        shown = ", ".join(_comparable(str(column[0]), str(column[1])) for column in columns)
        row = connection.execute(  # the names of columns are quoted
            f"""SELECT (SELECT count(*) FROM came_out), (SELECT count(*) FROM wanted),
                       (SELECT count(*) FROM (SELECT {shown} FROM wanted EXCEPT ALL SELECT {shown} FROM came_out)),
                       (SELECT count(*) FROM (SELECT {shown} FROM came_out EXCEPT ALL SELECT {shown} FROM wanted))"""  # noqa: S608
        ).fetchone()
    return dict(zip(("rows", "expected", "lost", "doubled"), cast("tuple[int, int, int, int]", row), strict=True))


def _comparable(name: str, kind: str) -> str:
    quoted = '"' + name.replace('"', '""') + '"'
    return f"printf('%.9g', {quoted}::DOUBLE)" if kind in ("FLOAT", "DOUBLE") else quoted


def count_lines(storage: Storage, path: str) -> int:
    """How many lines of a file are not blank; the file is read to its end, whatever its compression."""
    key = path.removeprefix(storage.root).lstrip("/")
    stream: Any = storage.open_read(key)
    try:
        return sum(1 for line in _lines(stream, path) if line.strip(b" \t\r\n"))
    finally:
        stream.close()


def _lines(stream: Any, path: str) -> Iterator[bytes]:
    lower = path.lower()
    if lower.endswith((".gz", ".gzip")):
        stream = gzip.GzipFile(fileobj=stream)
    elif lower.endswith((".zst", ".zstd")):
        import zstandard

        stream = zstandard.ZstdDecompressor().stream_reader(stream, read_across_frames=True)
    rest = b""
    first = True
    while piece := stream.read(1 << 20):
        *whole, rest = (rest + piece).split(b"\n")
        for line in whole:
            yield line.removeprefix(_BOM) if first else line
            first = False
    yield rest.removeprefix(_BOM) if first else rest
