"""Damages what is stored, the way disks, people and other tools do."""

from __future__ import annotations

import base64
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from deltalake import CommitProperties, DeltaTable, Transaction

from firnline.types import Json


def flips(data: bytes, step: int = 1) -> Iterator[tuple[int, bytes]]:
    """The same bytes with one bit of one byte turned over, for every byte."""
    for at in range(0, len(data), step):
        yield at, data[:at] + bytes([data[at] ^ (1 << (at * 5 % 8))]) + data[at + 1 :]


def cuts(data: bytes, step: int = 1) -> Iterator[tuple[int, bytes]]:
    """The first bytes only, for every length."""
    for at in range(0, len(data), step):
        yield at, data[:at]


def ledger_files(table: str | Path, pipeline: str) -> list[Path]:
    """Ledger entries, oldest first."""
    folder = Path(table) / "_firnline" / pipeline / "ledger"
    return sorted(p for p in folder.iterdir() if p.name[0].isdigit())


def commit_files(table: str | Path) -> list[Path]:
    """Commit files of the Delta log, oldest first."""
    return sorted((Path(table) / "_delta_log").glob("*.json"))


def commits_of(table: str | Path, pipeline: str, kind: str = "epoch") -> list[Path]:
    """Commit files that carry epochs (or claims) of a pipeline, oldest first."""
    found = []
    for path in commit_files(table):
        info = find_info(path)
        if info is not None and info["pipeline"] == pipeline and info["kind"] == kind:
            found.append(path)
    return found


def find_info(commit: Path) -> dict[str, Json] | None:
    """What a commit says in the key `firnline`."""
    for line in commit.read_text().splitlines():
        raw = json.loads(line).get("commitInfo", {}).get("firnline")
        if raw is not None:
            value: dict[str, Json] = json.loads(raw) if isinstance(raw, str) else raw
            return value
    return None


def change_info(commit: Path, change: Callable[[str], str]) -> None:
    """Change the text that a commit carries for Firnline; the rest of the commit stays valid."""
    lines = []
    for line in commit.read_text().splitlines():
        action = json.loads(line)
        if "commitInfo" in action:
            raw = action["commitInfo"]["firnline"]
            action["commitInfo"]["firnline"] = change(raw if isinstance(raw, str) else json.dumps(raw))
        lines.append(json.dumps(action))
    commit.write_text("\n".join(lines) + "\n")


def break_info(commit: Path) -> None:
    """Make a commit's copy of the checkpoint unreadable."""
    change_info(commit, lambda text: text[: len(text) // 2])


def write_blizzard(table: str | Path, source_state: Json, schema_version: int = 1, **fields: Json) -> None:
    """Commit as the other tool does: a `blizzard:` transaction and nothing of ours."""
    delta = DeltaTable(str(table))
    state = {
        "schema_version": schema_version,
        "source_state": source_state,
        "delta_version": delta.version(),
        **fields,
    }
    write_app_id(table, "blizzard:" + base64.b64encode(json.dumps(state).encode()).decode())


def write_app_id(table: str | Path, app_id: str) -> None:
    """A commit without data that carries one transaction."""
    delta: Any = DeltaTable(str(table))
    properties = CommitProperties(app_transactions=[Transaction(app_id, 1, 1_900_000_000_000)])
    delta.create_write_transaction([], "append", delta.schema(), commit_properties=properties)
