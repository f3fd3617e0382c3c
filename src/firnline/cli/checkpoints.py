"""`firnline checkpoints`: the newest checkpoints, in the order and words that Flink uses."""

from __future__ import annotations

from typing import Annotated

from cyclopts import App, Parameter
from cyclopts.validators import Number

from firnline.cli.common import Common, Spec, load_parts
from firnline.cli.output import Column, short_time

COLUMNS = (
    Column("epoch", right=True),
    Column("status"),
    Column("trigger_timestamp"),
    Column("end_to_end_duration_ms", "ms", right=True),
    Column("checkpointed_size_bytes", "bytes", right=True),
    Column("table_version", "version", right=True),
    Column("files", right=True),
    Column("rows", right=True),
    Column("quarantined", "bad", right=True),
)

EPILOGUE = """\
A checkpoint is what a commit carries: where the source stood after that
epoch. Reads the table and its ledger; starts no Spark and writes nothing.
Checkpoints older than the rollback window are folded together and no longer
listed.

Output (JSON: pipeline, checkpoints [...] with these fields):
  id, epoch, status (IN_PROGRESS, COMPLETED, FAILED), is_savepoint,
  trigger_timestamp, latest_ack_timestamp, end_to_end_duration_ms,
  checkpointed_size_bytes, state_size_bytes, acknowledged (sinks that hold it
  / sinks), path (sink, local, remote or fresh, for restores), table_version,
  kind, generation, run, files, rows, quarantined, last_committed_file

Environment:
  FIRNLINE__A__B      overrides the key a.b of the spec

Examples:
  firnline checkpoints --limit 5
  firnline checkpoints --json | jq -r '.checkpoints[0].epoch'
"""

app = App(name="checkpoints", help_epilogue=EPILOGUE)


@app.default
def checkpoints(
    spec: Spec = None,
    /,
    *,
    limit: Annotated[int, Parameter(help="How many to list.", validator=Number(gte=1))] = 20,
    common: Common = Common(),
) -> int:
    """List the newest checkpoints."""
    parts = load_parts(spec)
    from firnline.engine.status import load_checkpoints

    found = load_checkpoints(parts, limit)
    if common.json:
        common.out.json({"pipeline": parts.options.name, "checkpoints": found})
    elif found:
        common.out.table(COLUMNS, [{**row, "trigger_timestamp": short_time(row["trigger_timestamp"])} for row in found])
    else:
        common.out.line("no checkpoint yet; `firnline run` makes the first")
    return 0
