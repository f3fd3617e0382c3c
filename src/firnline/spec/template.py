"""The commented pipeline files that `firnline init` writes, one per template."""

from __future__ import annotations

import json
import re
from typing import Literal

_FILES = """\
# A Firnline pipeline: files into a Delta table, every record exactly once.
# Only name, path and table are needed; the values after "#" are the defaults.
# `firnline dry-run` checks this file without writing; `firnline run` starts it.

name: {name}                      # the pipeline's identity, stored in the table: do not change it later

sources:
  {name}:
    type: files
    path: in                      # folder, glob or URI (local, s3://, gs://, az://); relative to this file
    format: {format:<21} # ndjson, json, csv or parquet; text also as .gz or .zst
{csv}    # poll_interval_secs: 10      # seconds, or 5m: time between two listings for new files
    # start_after: 2026-01-01T00:00:00Z   # or a file name: start there
    # late_files: ingest          # or ignore, fail: a file whose name sorts before files already read
    # on_bad_record: quarantine   # or fail
    # max_bad_ratio: 0.5          # stop when more than this share of an epoch's records is bad
    # lineage: false              # true adds _firnline_file, _firnline_record, _firnline_epoch
    # schema:
    #   evolution: add            # or rescue, fail: a field that is no column yet
    #   fields:                   # inferred when left out
    #     - {{name: id, type: int64, nullable: false}}
    #     - {{name: price, type: "decimal(18,2)"}}
    # storage_options:            # credentials are references, never plain text
    #   aws_secret_access_key: ${{env:AWS_SECRET_ACCESS_KEY}}

sinks:
  - type: delta
    table: out                    # path or URI, created when missing; relative to this file
    # partition_by: [month]
    # file_size: 128MiB

"""
_FILES_TAIL = """\
# batch:                          # an epoch, the unit of commit, closes at the first of these
#   max_files: 1000
#   max_bytes: 1GiB               # or a number of bytes
#   max_events: 5000000
#   max_ms: 60000                 # or 1m
#   max_output_files: 1000

"""
_STREAM_TAIL = """\
# batch:                          # an epoch takes what is there, and closes at the first of these
#   max_events: 100000
#   max_bytes: 64MiB
#   max_ms: 200                   # how long to wait for more

"""
_TAIL = """\
# restart:                        # after a failure
#   attempts: 5
#   backoff_secs: 1

# checkpoint:                     # how far back a rollback can go, and where copies of checkpoints are stored
#   rollback_window: 64           # epochs, or a time like 7d
#   lease_seconds: 15             # `firnline run --standby` takes over after this long
#   store: {{type: file, path: data/firnline_checkpoints}}   # or sqlite, postgres, object: see docs/stores.md

# spark:                          # passed to Spark; set spark.master to run on a cluster
#   spark.master: "local[*]"
#   spark.driver.memory: 2g
"""
_KAFKA = """\
# A Firnline pipeline: a Kafka topic into a Delta table, every record exactly once. Needs: pip install 'firnline[kafka]'
# `firnline dry-run` checks this file and the brokers without writing; `firnline run` starts it.

name: {name}                      # the pipeline's identity, stored in the table: do not change it later

sources:
  {name}:
    type: kafka
    brokers: localhost:9092       # or a list
    topics: [{name}]
    # start: earliest             # or latest, or a time: where a new pipeline begins
    # include: [key, timestamp]   # columns beside the fields of the JSON value
    # tls: {{ca: /etc/kafka/ca.pem}}
    # sasl: {{mechanism: SCRAM-SHA-512, username: {name}, password: "${{env:KAFKA_PASSWORD}}"}}

sinks:
  - name: table                   # decides: its commit makes an epoch true
    type: delta
    table: out                    # path or URI, created when missing; relative to this file
    # partition_by: [month]
  # - name: topic                 # a follower: gets every epoch that the table holds, exactly once
  #   type: kafka
  #   brokers: localhost:9092
  #   topic: {name}-clean
  #   key: [id]
  #   required: false             # while it is away its rows wait in the outbox, and the table goes on

"""
_POSTGRES = """\
# A Firnline pipeline: files into a Delta table and a PostgreSQL table, every record exactly once in each.
# Needs: pip install 'firnline[postgres]'
# `firnline dry-run` checks this file and the server without writing; `firnline run` starts it.

name: {name}                      # the pipeline's identity, stored in the tables: do not change it later

sources:
  {name}:
    type: files
    path: in                      # folder, glob or URI (local, s3://, gs://, az://); relative to this file
    format: {format:<21} # ndjson, json, csv or parquet; text also as .gz or .zst
{csv}
sinks:
  - name: table                   # decides: its commit makes an epoch true
    type: delta
    table: out                    # path or URI, created when missing; relative to this file
  - name: database                # a follower: gets every epoch that the table holds, exactly once
    type: postgres
    dsn: postgresql://localhost:5432/postgres   # with a password: ${{env:DATABASE_URL}} or ${{file:path}}
    table: public.{table}
    required: false               # while it is away its rows wait in the outbox, and the table goes on
    # write: upsert               # one row per key, instead of a row per record
    # key: [id]
    # exclude: [raw]              # columns that are not delivered
    # mask: {{email: hash}}         # or redact, null
    # where: amount > 0           # deliver only these rows
    # on_bad_row: stop            # or dead_letter: keep a row that the table refuses, and go on

"""
_CHAIN = """\
# A Firnline pipeline that reads the table of another one: what is committed there comes here, exactly once.
# `firnline dry-run` checks this file without writing; `firnline run` starts it.

name: {name}                      # the pipeline's identity, stored in the table: do not change it later

sources:
  upstream:
    type: delta
    table: upstream               # path or URI of a Delta table, e.g. the `out` of another pipeline
    # start: beginning            # or now, or a version: where a new pipeline begins
    # on_change: fail             # or ignore, change_feed: a commit there that changes rows
    # lineage: false              # true adds version, commit and upstream epoch of every row

operators:                        # SQL runs on Spark, one epoch at a time
  - name: clean
    type: sql
    inputs: [upstream]
    query: SELECT * FROM upstream

sinks:
  - name: table
    type: delta
    table: out                    # the next pipeline of the chain can read this one
    input: clean

"""
_CAPTURED_SINKS = """\
sinks:
  - name: history                 # decides: its commit makes an epoch true. A row per change, with _op
    type: delta
    table: lake/orders_history    # path or URI, created when missing; relative to this file
    input: {name}.orders          # the changes of one table; `{name}` alone: those of all tables, as JSON
  - name: orders                  # the table as it is in the database, by key
    type: delta
    table: lake/orders
    input: {name}.orders
    write: upsert
    # key: [id]                   # the default is the primary key of the table

"""
_CAPTURED_TAIL = """\
# batch:                          # an epoch takes what is there, and closes at the first of these
#   max_events: 500000
#   max_bytes: 256MiB
#   max_ms: 200                   # how long to wait for more
#   respect_source_tx: true       # an epoch never splits a transaction

"""
_POSTGRES_TO_DELTA = """\
# A Firnline pipeline: the changes of PostgreSQL tables (14 or later) into Delta tables, every change exactly once.
# Needs: pip install 'firnline[postgres]'
#
# Once, on the server, as a superuser (then restart it, if wal_level was another one):
#   ALTER SYSTEM SET wal_level = 'logical';
#   CREATE ROLE firnline LOGIN REPLICATION PASSWORD '...';
#   GRANT SELECT ON orders TO firnline;
# Once, in the database, as the owner of the tables (a role that owns them can leave `publication` out):
#   CREATE PUBLICATION firnline FOR TABLE orders WITH (publish_via_partition_root = true);
# Then: export DATABASE_URL=postgresql://firnline:...@host:5432/database
#
# `firnline dry-run` checks this file and the server without writing; `firnline run` starts it. More: the page
# "PostgreSQL source" of the docs.

name: {name}                      # the pipeline's identity, stored in the tables: do not change it later

sources:
  {name}:
    type: postgres
    dsn: ${{env:DATABASE_URL}}      # or ${{file:path}}: it holds a password
    tables: [orders]              # or "billing.*"; a leading ! excludes
    publication: firnline         # left out: the run creates one, and adds the tables
    # snapshot: initial           # or never, always: rows that are there before the first run
    # slot: firnline              # the replication slot; the default has the names of pipeline and source
    # include: [committed_at, position, transaction]   # columns _committed_at, _position, _transaction

"""
_MYSQL_TO_DELTA = """\
# A Firnline pipeline: the changes of MySQL (8.0 or later) or MariaDB (10.11 or later) tables into Delta tables, every
# change exactly once. Needs: pip install 'firnline[mysql]'
#
# Once, below [mysqld] in the server's my.cnf (then restart it, if it wrote no binary log):
#   log_bin = binlog
#   server_id = 1
#   binlog_format = ROW
#   binlog_row_metadata = FULL
# Once, on the server, as root:
#   CREATE USER firnline IDENTIFIED BY '...';
#   GRANT SELECT, REPLICATION SLAVE, REPLICATION CLIENT ON *.* TO firnline;
# Then: export DATABASE_URL=mysql://firnline:...@host:3306/database
#
# `firnline dry-run` checks this file and the server without writing; `firnline run` starts it. More: the page
# "MySQL and MariaDB source" of the docs.

name: {name}                      # the pipeline's identity, stored in the tables: do not change it later

sources:
  {name}:
    type: mysql
    dsn: ${{env:DATABASE_URL}}      # or ${{file:path}}: it holds a password
    tables: [orders]              # of the dsn's database; or "billing.*"; a leading ! excludes
    # snapshot: initial           # or never, always: rows that are there before the first run
    # server_id: 4711             # the default is made from the names of pipeline and source; no replica may have it
    # include: [committed_at, position, transaction]   # columns _committed_at, _position, _transaction

"""
_COMMENTS_AT = 34
_TEMPLATES = {
    "files": _FILES + _FILES_TAIL,
    "kafka": _KAFKA + _STREAM_TAIL,
    "postgres": _POSTGRES + _FILES_TAIL,
    "chain": _CHAIN + _FILES_TAIL,
    "postgres-to-delta": _POSTGRES_TO_DELTA + _CAPTURED_SINKS + _CAPTURED_TAIL,
    "mysql-to-delta": _MYSQL_TO_DELTA + _CAPTURED_SINKS + _CAPTURED_TAIL,
}
TemplateName = Literal["files", "kafka", "postgres", "chain", "postgres-to-delta", "mysql-to-delta"]


def render_template(
    name: str = "pipeline", file_format: str = "ndjson", delimiter: str = ",", template: TemplateName = "files"
) -> str:
    """Return a commented spec for a pipeline of this name; it is valid as it stands."""
    csv = f"    csv: {{delimiter: {json.dumps(delimiter)}}}\n" if delimiter != "," else ""
    table = re.sub(r"[^a-z0-9_]", "_", name.lower())
    text = (_TEMPLATES[template] + _TAIL).format(name=name, format=file_format, csv=csv, table=table)
    return re.sub(r"^(.*\S) {2,}(?=# )", _pad, text, flags=re.MULTILINE)


def _pad(match: re.Match[str]) -> str:
    """Return what stands before the comment of a line, so long that the comments lie below each other."""
    words = match.group(1)
    return f"{words:<{_COMMENTS_AT}}" if len(words) < _COMMENTS_AT - 1 else f"{words}  "


def name_from(text: str) -> str:
    """Return a valid pipeline name that is close to a text, e.g. the name of a folder."""
    name = re.sub(r"[^A-Za-z0-9_.-]+", "-", text).lstrip("_.-").rstrip("-")[:100]
    return name or "pipeline"
