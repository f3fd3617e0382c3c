"""The PostgreSQL sink: rows of an epoch from the outbox into a table, beside COPY by the same driver."""

from __future__ import annotations

import shutil
from dataclasses import replace
from typing import Any

import numpy as np
import psycopg
import pyarrow as pa
from pyarrow import csv

from benchmarks.cases import Row, World
from benchmarks.turns import in_turns, p50
from firnline.checkpoint.ledger import Ledger
from firnline.sinks.postgres.encode import SIGNATURE, TRAILER, constant, encode, join_rows
from firnline.sinks.postgres.kind import open_sink
from firnline.sinks.postgres.options import PostgresSinkOptions
from firnline.sinks.registry import open_stager
from firnline.storage import LocalStorage
from firnline.testing.sinks import PIPELINE, SinkDriver
from tests.support.postgres import running_postgres

ROWS, ROUNDS, BATCH = 1_000_000, 5, 65_536
AIM = 0.9
_COLUMNS = "(id bigint, name text, amount double precision, at timestamptz"
_WIRES = {"id": "int8", "name": "text", "amount": "float8", "at": "timestamp"}


def postgres_sink(world: World) -> list[Row]:
    """Rows per second into an empty table: an epoch, COPY of rows that are encoded already, COPY of CSV."""
    rows = _sample(max(10_000, int(ROWS * world.scale)))
    encoded = [
        join_rows(
            [encode(batch.column(name), wire) for name, wire in _WIRES.items()],
            [constant(f"{PIPELINE}/copy".encode()), constant((1).to_bytes(8, "big"))],
        )
        for batch in rows.to_batches(BATCH)
    ]
    folder = world.folder / "postgres"
    folder.mkdir()
    with running_postgres() as server, psycopg.connect(server.dsn, autocommit=True) as db:
        db.execute(f"CREATE TABLE ours {_COLUMNS}, _firnline_sink text, _firnline_epoch bigint)")
        db.execute(f"CREATE TABLE encoded {_COLUMNS}, _firnline_sink text, _firnline_epoch bigint)")
        db.execute(f"CREATE TABLE texts {_COLUMNS})")
        options = PostgresSinkOptions("copy", server.dsn, "ours")
        driver = SinkDriver(lambda c: open_sink(options, c), Ledger(LocalStorage(str(folder)), PIPELINE), generation=1)
        stager = open_stager(driver.sink.stage_target(), "a" * 16)
        for batch in rows.to_batches(BATCH):
            stager.write(batch)
        files = stager.close()

        def ours() -> None:
            db.execute("TRUNCATE ours")
            driver.commit(replace(driver.stage([]), files=files, schema=rows.schema))

        def copy_encoded() -> None:
            db.execute("TRUNCATE encoded")
            _copy(
                db,
                "COPY encoded FROM STDIN (FORMAT binary)",
                [SIGNATURE, *(memoryview(one) for one in encoded), TRAILER],
            )

        def copy_csv() -> None:
            db.execute("TRUNCATE texts")
            _copy(db, "COPY texts FROM STDIN (FORMAT csv)", map(_to_csv, rows.to_batches(BATCH)))

        times = in_turns([ours, copy_encoded, copy_csv], rounds=world.rounds(ROUNDS), each=1)
    shutil.rmtree(folder)
    rate, by_copy, by_csv = (rows.num_rows * 1000 / p50(one) for one in times)
    ratio = rate / by_copy
    return [
        Row("postgres append: rows", round(rate), "per s", round(by_copy), ratio, f">= {AIM:g}x", ratio >= AIM),
        Row("postgres append: rows, beside CSV", round(rate), "per s", round(by_csv), rate / by_csv),
    ]


def _sample(count: int) -> pa.Table:
    random = np.random.default_rng(1)
    return pa.table(
        {
            "id": pa.array(np.arange(count)),
            "name": pa.array([f"customer {number % 50_000}" for number in range(count)]),
            "amount": pa.array(random.random(count)),
            "at": pa.array(random.integers(0, 2**50, count), pa.timestamp("us", "UTC")),
        }
    )


def _to_csv(batch: pa.RecordBatch) -> bytes:
    out = pa.BufferOutputStream()
    csv.write_csv(batch, out, csv.WriteOptions(include_header=False))
    data: bytes = out.getvalue().to_pybytes()
    return data


def _copy(db: psycopg.Connection[Any], statement: str, pieces: Any) -> None:
    with db.transaction(), db.cursor().copy(statement) as copy:
        for piece in pieces:
            copy.write(piece)
