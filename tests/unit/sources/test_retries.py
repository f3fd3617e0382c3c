"""Retries are asked for, planned and forgotten by three threads."""

from __future__ import annotations

from pathlib import Path

from firnline.sources.base import Limits
from firnline.sources.files.options import FileSourceOptions
from firnline.sources.files.source import FileSource
from firnline.storage import FileStat, LocalStorage

LIMITS = Limits(max_files=10, max_bytes=1000, max_events=1000, max_ms=1000, max_output_files=10, parallelism=1)


class Meddling(LocalStorage):
    """While a plan looks at a file, another thread is done with its retry and a third asks for one more."""

    source: FileSource

    def stat(self, key: str) -> FileStat:
        self.source.forget_requests([f"{self.root}/a.json"])
        self.source.retry(f"{self.root}/c.json", changed=False)
        return super().stat(key)


def test_retries_may_change_while_they_are_planned(tmp_path: Path) -> None:
    for name in ("a.json", "b.json", "c.json"):
        (tmp_path / name).write_text("{}\n")
    storage = Meddling(str(tmp_path))
    source = FileSource(FileSourceOptions("files", str(tmp_path)), storage=storage)
    storage.source = source
    aside = {
        str(tmp_path / name): {"records": 0, "offset": 0, "line": 0, "size_bytes": 3, "etag": "x", "reason": "broken"}
        for name in ("a.json", "b.json", "c.json")
    }
    position = {**source.start(None), "set_aside": aside, "last_committed_file": str(tmp_path / "d.json")}
    source.retry(str(tmp_path / "a.json"), changed=False)
    source.retry(str(tmp_path / "b.json"), changed=False)
    plan = source.plan(position, LIMITS)
    assert plan is not None
    assert {str(i["path"]) for split in plan.splits for i in split.inputs} == {
        str(tmp_path / "a.json"),
        str(tmp_path / "b.json"),
    }
