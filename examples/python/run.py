"""A pipeline in plain Python: runs on a thread of its own, shows what happens, and stops when all input is read."""

from __future__ import annotations

import json
from pathlib import Path

from firnline import Pipeline

HERE = Path.cwd()


def write_orders(folder: Path) -> None:
    """Write 3 files of 100 orders each, unless they are there. Each is written elsewhere, then renamed."""
    folder.mkdir(exist_ok=True)
    for number in range(3):
        if (folder / f"orders-{number}.ndjson").exists():
            continue
        orders = [{"id": 100 * number + one, "amount": one * 1.5} for one in range(100)]
        new = HERE / f".orders-{number}.ndjson"
        new.write_text("".join(json.dumps(order) + "\n" for order in orders))
        new.rename(folder / f"orders-{number}.ndjson")


def main() -> None:
    """Run the pipeline once."""
    write_orders(HERE / "in")
    pipeline = Pipeline(
        name="orders",
        sources={"in": {"type": "files", "path": str(HERE / "in"), "min_age_secs": 0}},
        sinks=[{"type": "delta", "table": str(HERE / "orders")}],
    )
    with pipeline.start(once=True) as run:
        for event in run.events():
            if event.kind == "committed":
                print(f"epoch {event.facts['epoch']}: {event.facts['rows']} rows in {event.facts['duration_ms']} ms")
            elif event.kind == "trouble":
                print(f"tries again: {event.facts['message']}")
        result = run.wait()
    print(f"{result.rows} rows, exit code {result.exit_code}")


if __name__ == "__main__":
    main()
