"""Input whose every record can be found again, and the readers that look for it: DuckDB and delta-rs, never our own."""

from __future__ import annotations

import gzip
import itertools
import json
import os
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import zstandard
from deltalake import DeltaTable
from deltalake.exceptions import TableNotFoundError

from firnline.types import Json
from tests.support import duck


def make_old(path: Path, seconds: float = 60.0) -> None:
    """Set the file's time back, so that no run takes it for one that is still being written."""
    stat = path.stat()
    os.utime(path, ns=(stat.st_atime_ns, stat.st_mtime_ns - int(seconds * 1e9)))


class SampleInput:
    """A folder of files, and what was put into it: every good record has an id of its own."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.folder.mkdir(parents=True, exist_ok=True)
        self.ids: Counter[int] = Counter()
        self.bad: Counter[bytes] = Counter()
        self._next = itertools.count(1)

    def path(self, name: str) -> Path:
        return self.folder / name

    def lines(self, records: int, bad: int = 0, **fields: Json) -> list[bytes]:
        """New lines, counted as expected in the table or in quarantine."""
        found = []
        for _ in range(records):
            number = next(self._next)
            self.ids[number] += 1
            record = {"id": number, "month": f"2026-{number % 3 + 1:02d}", "v": number / 7, **fields}
            found.append(json.dumps(record).encode())
        for _ in range(bad):
            raw = b"{bad %d" % next(self._next)
            self.bad[raw] += 1
            found.append(raw)
        return found

    def add(self, name: str, records: int = 5, bad: int = 0, **fields: Json) -> Path:
        """A new file; compressed by its suffix."""
        path = self.path(name)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(pack(name, b"".join(line + b"\n" for line in self.lines(records, bad, **fields))))
        make_old(path)
        return path

    def add_truncated(self, name: str, records: int = 200) -> bytes:
        """A gz file cut in the middle; returns the whole one. Its records count as expected only by `expect`."""
        lines = self.lines(records)
        whole = pack(name, b"".join(line + b"\n" for line in lines))
        self.path(name).write_bytes(whole[: len(whole) // 2])
        make_old(self.path(name))
        self.forget(lines)
        return whole

    def forget(self, lines: Iterable[bytes]) -> None:
        """These records are not expected (any more)."""
        self.ids -= Counter(json.loads(line)["id"] for line in lines)

    def expect(self, lines: Iterable[bytes]) -> None:
        """These records are expected after all."""
        self.ids += Counter(json.loads(line)["id"] for line in lines)


def pack(name: str, data: bytes) -> bytes:
    """Compress as the suffix says."""
    if name.endswith(".gz"):
        return gzip.compress(data, 1, mtime=0)
    if name.endswith(".zst"):
        return zstandard.compress(data)
    return data


def unpack_lines(data: bytes) -> list[bytes]:
    """The lines of a whole gz file."""
    return gzip.decompress(data).splitlines()


def table_ids(table: str | Path, column: str = "id", **options: Any) -> Counter[int]:
    """Every id in a Delta table, with how often it is there: the log read by delta-rs, the files by DuckDB."""
    try:
        files = DeltaTable(str(table), **options).file_uris()
    except TableNotFoundError:
        return Counter()
    if not files:
        return Counter()
    rows = duck.execute(f'select "{column}" from read_parquet({[str(f) for f in files]!r}, union_by_name=true)')
    return Counter(int(row[0]) for row in rows.fetchall() if row[0] is not None)


def table_rows(table: str | Path) -> list[dict[str, Any]]:
    """All rows, by delta-rs and its own query engine."""
    found: list[dict[str, Any]] = DeltaTable(str(table)).to_pyarrow_table().to_pylist()
    return found


def quarantined(table: str | Path, pipeline: str) -> Counter[bytes]:
    """Raw bytes of every quarantined record that a commit names, found through the log's own words.

    The newest commit names its ledger entry, each entry the one before it; read here as plain JSON.
    """
    root = Path(table)
    found: Counter[bytes] = Counter()
    name = newest_entry(root, pipeline)
    while name is not None:
        entry = json.loads((root / "_firnline" / pipeline / "ledger" / name).read_bytes())
        for file in entry["quarantine"]:
            path = root / "_firnline" / pipeline / "quarantine" / file["name"]
            rows = duck.execute(f"select raw from read_parquet('{path}')").fetchall()
            found.update(bytes(row[0]) for row in rows)
        name = entry["previous"]["name"] if entry["previous"] else None
    return found


def newest_entry(root: Path, pipeline: str, version: int | None = None) -> str | None:
    """The ledger entry that the newest commit of a pipeline names, at a version or at all."""
    paths = sorted((root / "_delta_log").glob("*.json"), reverse=True)
    for path in paths if version is None else (p for p in paths if int(p.stem) <= version):
        for line in path.read_text().splitlines():
            info = json.loads(line).get("commitInfo", {}).get("firnline")
            if info is None:
                continue
            value = json.loads(info) if isinstance(info, str) else info
            if value["pipeline"] == pipeline and value["kind"] == "epoch":
                return str(value["entry"]["name"])
    return None


def files_below(folder: str | Path) -> dict[str, bytes]:
    """Every file below a folder, by its path in it."""
    root = Path(folder)
    return {str(path.relative_to(root)): path.read_bytes() for path in sorted(root.rglob("*")) if path.is_file()}
