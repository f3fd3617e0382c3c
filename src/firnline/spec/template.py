"""The commented pipeline file that `firnline init` writes."""

from __future__ import annotations

import json
import re

_TEMPLATE = """\
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

# batch:                          # an epoch, the unit of commit, closes at the first of these
#   max_files: 1000
#   max_bytes: 1GiB               # or a number of bytes
#   max_events: 5000000
#   max_ms: 60000                 # or 1m
#   max_output_files: 1000

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


def render_template(name: str = "pipeline", file_format: str = "ndjson", delimiter: str = ",") -> str:
    """Return a commented spec for a pipeline of this name; it is valid as it stands."""
    csv = f"    csv: {{delimiter: {json.dumps(delimiter)}}}\n" if delimiter != "," else ""
    return _TEMPLATE.format(name=name, format=file_format, csv=csv)


def name_from(text: str) -> str:
    """Return a valid pipeline name that is close to a text, e.g. the name of a folder."""
    name = re.sub(r"[^A-Za-z0-9_.-]+", "-", text).lstrip("_.-").rstrip("-")[:100]
    return name or "pipeline"
