"""How long a command takes to start: the first commit of one small file, nothing to do, a decoder not yet compiled."""

from __future__ import annotations

import json
import os
import shutil
import statistics
import subprocess
import sys
from pathlib import Path

from benchmarks.cases import Row, World
from benchmarks.turns import round_off
from firnline.clock import monotonic

AIM = 1.3  # times a bare session and one job
ROUNDS = 3
COMMITTED = "epoch 1 committed"
DONE = "job done"
BARE = f"""
from pyspark.sql import SparkSession
session = SparkSession.builder.master("local[*]").getOrCreate()
def same(batches):
    yield from batches
session.range(0, 1, 1, 1).mapInArrow(same, "id long").collect()
print({DONE!r}, flush=True)
session.stop()
"""


def first_commit(world: World) -> list[Row]:
    """One small file, from the start of the process to its commit, in turns with a bare session that runs one job."""
    folder = world.folder / "first-commit"
    rounds = ROUNDS if world.scale >= 0.5 else 1
    ours, bare, idle = [], [], []
    for _ in range(rounds):
        ours.append(_run_once(folder))
        bare.append(_seconds_until(DONE, [sys.executable, "-c", BARE], world.folder))
        idle.append(_seconds_until("nothing to do", [*_firnline(), "run", "--once"], folder))
    ratio = statistics.median(mine / peer for mine, peer in zip(ours, bare, strict=True))
    aim = f"at most {AIM} times a bare session and one job"
    mine, peer = statistics.median(ours), statistics.median(bare)
    return [
        Row("start to first commit", round_off(mine), "s", round_off(peer), round_off(ratio), aim, ratio <= AIM),
        Row("run --once with nothing to do", round_off(statistics.median(idle)), "s"),
    ]


def decoder(world: World) -> list[Row]:
    """The decoder's first use in an installation, and the first commit there."""
    folder, cache = world.folder / "first-decoder", world.folder / "decoder"
    # A trial, whose figures mean nothing, loads what the installation has compiled.
    environ = dict(os.environ) if world.is_trial else {**os.environ, "NUMBA_CACHE_DIR": str(cache)}
    command = [sys.executable, "-c", f"from firnline.ndjson import warm_up; warm_up(); print({DONE!r})"]
    compiling = _seconds_until(DONE, command, world.folder, environ)
    loading = _seconds_until(DONE, command, world.folder, environ)
    shutil.rmtree(cache, ignore_errors=True)
    return [
        Row("compile the decoder", round_off(compiling), "s"),
        Row("load the compiled decoder", round_off(loading), "s"),
        Row("start to first commit while the decoder compiles", round_off(_run_once(folder, environ)), "s"),
    ]


def _firnline() -> list[str]:
    return [sys.executable, "-m", "firnline.cli"]


def _run_once(folder: Path, environ: dict[str, str] | None = None) -> float:
    """Ingest one small file into a new table; return the seconds until it is committed."""
    shutil.rmtree(folder, ignore_errors=True)
    (folder / "in").mkdir(parents=True)
    lines = [json.dumps({"id": number, "name": f"n{number}", "value": number / 2}) for number in range(100)]
    (folder / "in" / "a.json").write_text("\n".join(lines) + "\n")
    (folder / "firnline.yml").write_text(
        "name: first\nsources: {in: {type: files, path: in, min_age_secs: 0}}\nsinks: [{type: delta, table: out}]\n"
    )
    return _seconds_until(COMMITTED, [*_firnline(), "run", "--once"], folder, environ)


def _seconds_until(text: str, command: list[str], folder: Path, environ: dict[str, str] | None = None) -> float:
    """Return the seconds from the start of a process until it prints `text`; wait for its end."""
    began = monotonic()
    process = subprocess.Popen(
        command, cwd=folder, env=environ, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    assert process.stdout is not None
    seconds, printed = None, []
    for line in process.stdout:
        printed.append(line)
        if seconds is None and text in line:
            seconds = monotonic() - began
    if process.wait() or seconds is None:
        raise RuntimeError(f"{command[-1]!r} ended with {process.returncode}: {''.join(printed)[-2000:]}")
    return seconds
