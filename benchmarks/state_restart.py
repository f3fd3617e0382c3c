"""Run by the case `restart` in a process of its own: one pipeline that warms Spark up, then the one that is timed."""

from __future__ import annotations

import json
import sys
from pathlib import Path

from benchmarks.state_runs import run_totals, totals_options
from firnline.jobs.spark import SparkEngine


def main(source: Path, work: Path, other_source: Path, other_work: Path) -> None:
    """Print, as JSON, the seconds of the first epoch and of the others, each from its plan to its commit."""
    engine = SparkEngine("bench", {})
    try:
        run_totals(engine, totals_options(other_source, other_work))
        told = run_totals(engine, totals_options(source, work, max_inflight=1))
    finally:
        engine.stop()
    took = [told.committed_at[facts.epoch] - told.planned_at[facts.epoch] for facts in told.epochs]
    print(json.dumps({"first": took[0], "warm": took[1:], "opened": told.committed_at[told.first]}))


if __name__ == "__main__":
    main(*map(Path, sys.argv[1:]))
