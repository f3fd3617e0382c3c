"""`firnline trace`: prints where an event comes from."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated

from cyclopts import App, Parameter

from firnline.cli.common import Common, Spec, load_pipeline, read_with_store
from firnline.types import Json

EPILOGUE = """\
Every event that a sink gets from the outbox has an id: PIPELINE/EPOCH/PORT/ROW
(the header firnline-id in Kafka). The ledger says where the row comes from: a
file and a record in it, a topic, partition and offset, or a version and a file
of a Delta table. A row of an operator comes from all that its epoch read, and
from state. Works while the ledger has the entry of the epoch: old entries are
folded, and then only say what the epoch read. Starts no Spark, writes nothing.

Output (JSON fields):
  id, pipeline, epoch, port, row, created_at, committed_at, run, attempt, entry,
  undone (a rollback undid the epoch)
  origins [{sinks, kind, ...}]: one, or one for each sink if an epoch has other
          rows for each
          kind files: source, file, record (from 0), line (from 1; if it is
          known), size_bytes, etag
          kind kafka: source, topic, partition, offset
          kind delta: source, file, record, version
          kind dead-letter: id (of the row when it was refused), of [origins]
          kind operator, copy (firnline sinks resync), folded
  inputs  {source: [...]}: all that the epoch read

Environment:
  FIRNLINE__A__B      overrides the key a.b of the spec

Examples:
  firnline trace shop/12/orders/4711
  firnline trace shop/12/orders/4711 pipeline.yml --json
"""

app = App(name="trace", help_epilogue=EPILOGUE)


@app.default
def trace(
    event_id: Annotated[str, Parameter(name="ID", help="The id of the event.")],
    spec: Spec = None,
    *,
    common: Common = Common(),
) -> int:
    """Show which input an event comes from, and when it was committed."""
    pipeline = load_pipeline(spec)
    from firnline.history.trace import EventId
    from firnline.history.trace import trace as find

    event = EventId.parse(event_id)
    found = read_with_store(pipeline, lambda store: find(pipeline, store, event))
    if common.json:
        common.out.json(found)
        return 0
    facts: dict[str, object] = {
        "event": found["id"],
        "epoch": f"{found['epoch']}, undone" if found["undone"] else found["epoch"],
        "committed": found["committed_at"] or found["created_at"],
        "ledger entry": found["entry"] or "lost",
    }
    for origin in found["origins"]:
        facts[f"origin ({', '.join(origin['sinks'])})" if len(found["origins"]) > 1 else "origin"] = _text(origin)
    if any(origin["kind"] in ("operator", "folded") for origin in found["origins"]):
        facts |= {f"read from {source}": _few(paths) for source, paths in found["inputs"].items()}
    common.out.facts(facts)
    return 0


def _text(origin: Mapping[str, Json]) -> str:
    match origin["kind"]:
        case "kafka":
            return f"topic {origin['topic']}, partition {origin['partition']}, offset {origin['offset']}"
        case "dead-letter":
            return f"dead letter {origin['id']}: {'; '.join(_text(one) for one in origin['of'])}"
        case "operator":
            return "an operator: all that the epoch read, and state"
        case "copy":
            return "a copy of a table (firnline sinks resync)"
        case "folded":
            return "not known any more: the ledger entry is folded"
    version = f", version {origin['version']}" if "version" in origin else ""
    place = f"line {origin['line']}" if "line" in origin else f"record {origin['record']} (from 0)"
    return f"{origin['file']}, {place}{version}"


def _few(paths: Sequence[str]) -> str:
    return ", ".join(paths[:3]) + (f" and {len(paths) - 3} more" if len(paths) > 3 else "")
