"""`firnline quarantine`: shows records that could not be decoded, byte for byte."""

from __future__ import annotations

import base64
from collections import Counter
from typing import Annotated

from cyclopts import App, Parameter
from cyclopts.validators import Number

from firnline.cli.common import Common, Spec, load_pipeline
from firnline.cli.output import safe_bytes
from firnline.cli.table import Column
from firnline.types import Json

RAW_SHOWN = 80
COLUMNS = (
    Column("epoch", right=True, drop=1),
    Column("reason"),
    Column("file", cut="left"),
    Column("line", right=True),
    Column("raw", cut="right"),
)

EPILOGUE = """\
Shows bad records of committed epochs only, newest epoch first. Reads the
table; starts no Spark and writes nothing.

Output (JSON: pipeline, more, quarantine [...] with these fields):
  file, line (from 1), record (from 0), reason, epoch, raw (on the screen
  escaped and shortened, in JSON base64)

Environment:
  FIRNLINE__A__B      overrides the key a.b of the spec

Examples:
  firnline quarantine --reason not-json
  firnline quarantine --json --limit 0 | jq -r '.quarantine[].raw' | base64 -d
"""

app = App(name="quarantine", help_epilogue=EPILOGUE)


@app.default
def quarantine(
    spec: Spec = None,
    *,
    reason: Annotated[str | None, Parameter(help="Only records with this reason. [default: all]")] = None,
    limit: Annotated[int, Parameter(help="Maximum number to show; 0 shows all.", validator=Number(gte=0))] = 20,
    common: Common = Common(),
) -> int:
    """Show records that could not be decoded."""
    pipeline = load_pipeline(spec)
    from firnline.history.status import load_quarantine

    records: list[dict[str, Json]] = []
    more = False
    reasons: Counter[str] = Counter()
    for row in load_quarantine(pipeline):
        reasons[str(row["reason"])] += 1
        if reason is not None and row["reason"] != reason:
            continue
        if limit and len(records) == limit:
            more = True
            break
        records.append(row)
    if common.json:
        rows = [{**row, "raw": base64.b64encode(row["raw"]).decode()} for row in records]
        common.out.json({"pipeline": pipeline.options.name, "more": more, "quarantine": rows})
    elif records:
        common.out.table(COLUMNS, [{**row, "raw": safe_bytes(row["raw"], RAW_SHOWN)} for row in records])
        if more:
            common.out.line("there are more; --limit 0 shows all")
    elif reasons:
        others = ", ".join(f"{name} ({count:,})" for name, count in sorted(reasons.items()))
        common.out.line(f"no record is quarantined as {reason}; the reasons are: {others}")
    else:
        common.out.line("nothing is quarantined")
    return 0
