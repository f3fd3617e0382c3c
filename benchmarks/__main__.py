"""`python -m benchmarks`: run all, print a table with ratios, write bench-results.json."""

from __future__ import annotations

import argparse
import json
import logging
import os
import platform
import shutil
import sys
import tempfile
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from benchmarks import (
    capture,
    cases,
    delivery,
    kafka_sink,
    kafka_source,
    postgres_sink,
    redis_sink,
    service,
    staging,
    starts,
    state,
    state_exchange,
    stores,
    tiers,
    topology,
    upsert,
)

CASES: dict[str, Callable[[cases.World], list[cases.Row]]] = {
    "throughput": cases.throughput,
    "small-files": cases.small_files,
    "commits": cases.commits,
    "state": cases.state,
    "listing": cases.listing,
    "memory": cases.memory,
    "fsync": cases.fsync_cost,
    "recovery": cases.recovery,
    "first-commit": starts.first_commit,
    "decoder": starts.decoder,
    "staged-ingest": staging.staged_ingest,
    "units": staging.units,
    "poll": staging.poll,
    "latency": staging.latency,
    "epoch-loop": tiers.epoch_loop,
    "recovery-paths": tiers.recovery_paths,
    "stores": stores.stores,
    "packing": stores.packing,
    "rollback": tiers.rollback,
    "upsert": upsert.upsert,
    "kafka-source": kafka_source.kafka_source,
    "capture-decode": capture.capture_decode,
    "capture-backlog": capture.capture_backlog,
    "capture-debezium": capture.capture_debezium,
    "capture-snapshot": capture.capture_snapshot,
    "capture-memory": capture.capture_memory,
    "capture-latency": capture.capture_latency,
    "redis-sink": redis_sink.redis_sink,
    "kafka-sink": kafka_sink.kafka_sink,
    "postgres-sink": postgres_sink.postgres_sink,
    "delivery": delivery.delivery,
    "keyed-aggregation": state.keyed_aggregation,
    "state-size": state.state_size,
    "checkpoint-bytes": state.checkpoint_bytes,
    "restart": state.restart,
    "rescale": state.rescale,
    "exchange": state_exchange.exchange_choice,
    "service-overview": service.overview,
    "service-memory": service.memory,
    "service-rate": service.rate,
    "service-viewers": service.viewers,
    "topology": topology.topology,
    "growth": stores.growth,  # last: it deletes so many files that the disk is slow for a while
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("cases", nargs="*", help=f"which: {', '.join(CASES)}; all by default")
    parser.add_argument("--scale", type=float, default=1.0, help="size of the inputs; 1.0 is what the docs quote")
    parser.add_argument("--out", type=Path, default=Path("bench-results.json"))
    args = parser.parse_args()
    logging.getLogger("firnline").setLevel(logging.ERROR)  # first starts and slow disks are no news here
    console = Console()
    folder = Path(tempfile.mkdtemp(prefix="firnline-bench-"))
    world = cases.World(folder, args.scale)
    rows: list[cases.Row] = []
    failed: dict[str, str] = {}
    try:
        for name in args.cases or CASES:
            console.print(f"[bold]{name}[/bold] ...")
            try:
                found = CASES[name](world)
            except Exception as error:  # the other cases are measured all the same
                failed[name] = f"{type(error).__name__}: {error}"
                traceback.print_exc()
                continue
            rows += found
            for row in found:
                console.print(
                    f"  {row.name}: {row.firnline:g} {row.unit}" + (f", peer {row.peer:g}" if row.peer else "")
                )
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    console.print(_table(rows))
    machine = {"cores": os.cpu_count(), "python": platform.python_version(), "system": platform.system()}
    body: dict[str, Any] = {
        "machine": machine,
        "scale": args.scale,
        "rows": [row.to_json() for row in rows],
        "failed": failed,
    }
    args.out.write_text(json.dumps(body, indent=2) + "\n")
    for name, told in failed.items():
        console.print(f"[red]{name} failed[/red]: {told}")
    sys.exit(1 if failed else 0)


def _table(rows: list[cases.Row]) -> Table:
    table = Table("case", "firnline", "peer", "ratio", "aim", "met", title="Firnline beside its peer, one run")
    for row in rows:
        ratio = f"{row.ratio:.2f}" if row.ratio is not None else ""
        met = "" if row.met is None else ("yes" if row.met else "NO")
        peer = "" if row.peer is None else f"{row.peer:g} {row.unit}"
        table.add_row(row.name, f"{row.firnline:g} {row.unit}", peer, ratio, row.aim, met)
    return table


if __name__ == "__main__":
    main()
