"""Makes the files of a table older than they are."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path

DAY = 86_400


def age_files(root: Path | str, seconds: float) -> None:
    """Every file below the folder was written longer ago; links are left alone."""
    stamp = time.time() - seconds
    for path in Path(root).rglob("*"):
        if path.is_file() and not path.is_symlink():
            os.utime(path, (stamp, stamp))


def age_log(table: Path | str, seconds: float) -> None:
    """The table's log was written longer ago, and every file that it removes was removed longer ago."""
    for path in (Path(table) / "_delta_log").glob("*.json"):
        lines = [json.loads(line) for line in path.read_text().splitlines()]
        for line in lines:
            if "remove" in line:
                line["remove"]["deletionTimestamp"] -= int(seconds * 1000)
        path.write_text("\n".join(json.dumps(line) for line in lines))
    age_files(Path(table) / "_delta_log", seconds)


def age_table(table: Path | str, seconds: float) -> None:
    """Everything in the table happened longer ago, removals too."""
    age_log(table, seconds)
    age_files(table, seconds)
