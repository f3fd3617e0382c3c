"""Replays and drops of quarantined records: which records, and the request to the next epoch.

A request that is repeated passes over records that are requested already, or that an epoch has dealt with.
"""

from __future__ import annotations

import shlex
from collections import Counter
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from fnmatch import fnmatchcase

from firnline.history.quarantine import QuarantineFile, load_quarantine_files
from firnline.history.store import on_record
from firnline.run.open_pipeline import OpenPipeline
from firnline.types import Json

FILES_PER_REQUEST = 200


@dataclass(frozen=True, slots=True)
class RecordFilter:
    """Which records a command is about."""

    reason: str | None
    file: str | None
    epoch: int | None
    until_epoch: int | None = None

    @property
    def facts(self) -> dict[str, Json]:
        """What was given, by name."""
        return {name: value for name, value in asdict(self).items() if value is not None}

    @property
    def words(self) -> list[str]:
        """The options that choose these records, up to the given epoch."""
        return [word for name, value in self.facts.items() for word in (f"--{name.replace('_', '-')}", str(value))]

    @property
    def options(self) -> str:
        """The options that choose these records, to be typed again."""
        return "".join(f" {shlex.quote(word)}" for word in self.words)

    def takes(self, row: Mapping[str, Json]) -> bool:
        """Return whether a record is one of them."""
        if self.epoch is not None and row["epoch"] != self.epoch:
            return False
        if self.until_epoch is not None and row["epoch"] > self.until_epoch:
            return False
        if self.file is not None:
            path = str(row["file"])
            if not fnmatchcase(path, self.file) and not path.endswith(f"/{self.file.lstrip('/')}"):
                return False
        return self.reason is None or row["reason"] == self.reason


@dataclass(slots=True)
class ChosenRecords:
    """The records that a replay or a drop is about."""

    requests: dict[str, list[dict[str, Json]]] = field(default_factory=dict)  # by source: files of the quarantine
    records: Counter[str] = field(default_factory=Counter)  # by reason
    files: dict[str, set[str]] = field(default_factory=dict)  # by reason
    left_out: Counter[str] = field(default_factory=Counter)  # by obstacle
    wanted: RecordFilter | None = None

    def to_json(self) -> dict[str, Json]:
        """Return the fields that `firnline quarantine --replay --json` shows."""
        plan = [
            {"reason": reason, "records": count, "files": len(self.files[reason])}
            for reason, count in sorted(self.records.items())
        ]
        return {"records": self.records.total(), "left_out": dict(self.left_out), "plan": plan}


def choose_records(pipeline: OpenPipeline, wanted: RecordFilter, *, discard: bool) -> ChosenRecords:
    """Choose the records of the quarantine that can be read again or, with `discard`, dropped."""
    asked: dict[str, list[list[int]]] = {}  # file of the quarantine -> ranges of rows
    for one in (file for request in pipeline.requests.load() for file in request.files):
        asked.setdefault(str(one["name"]), []).extend(one["rows"])
    chosen = ChosenRecords(wanted=wanted)
    for file in load_quarantine_files(pipeline):
        rows = []
        for number, row in file.rows:
            if not wanted.takes(row):
                continue
            obstacle = _obstacle(pipeline, file, row, discard=discard)
            if any(first <= number <= last for first, last in asked.get(file.name, ())):
                obstacle = "already requested"
            if obstacle:
                chosen.left_out[obstacle] += 1
                continue
            rows.append(number)
            chosen.records[str(row["reason"])] += 1
            chosen.files.setdefault(str(row["reason"]), set()).add(str(row["file"]))
        if rows:
            chosen.requests.setdefault(file.source, []).append(file.describe(rows))
    return chosen


def ask_records(pipeline: OpenPipeline, chosen: ChosenRecords, run: str, *, discard: bool) -> None:
    """Ask the next epoch to read the records again or, with `discard`, to drop them."""
    what = "quarantine-drop" if discard else "quarantine-replay"
    newest, total = pipeline.load().epoch, chosen.records.total()
    facts: dict[str, Json] = {"records": total}
    if chosen.wanted is not None:
        facts |= chosen.wanted.facts
    with on_record(pipeline, what, run, from_epoch=newest, to_epoch=None, **facts) as found:
        found["asked"] = total
        for source, files in chosen.requests.items():
            for at in range(0, len(files), FILES_PER_REQUEST):
                part = files[at : at + FILES_PER_REQUEST]
                pipeline.requests.ask_replay(source, part, discard=discard, ids=pipeline.ids)


def _obstacle(pipeline: OpenPipeline, file: QuarantineFile, row: Mapping[str, Json], *, discard: bool) -> str:
    """Return why a record cannot be read again, or dropped; empty if it can."""
    options = next((one for one in pipeline.options.sources if one.name == file.source), None)
    if discard and (options is None or options.replays_quarantine):
        return ""
    if row["reason"] == "too-long":
        return "only the beginning of a record that is too long is stored; use `firnline files --reread`"
    if options is None:
        return f"the source {file.source} is not in the spec"
    if not options.replays_quarantine:
        return f"a {options.type} source neither reads quarantined records again nor drops them; use --export"
    if options.replay_obstacle:
        return f"{options.replay_obstacle}; use --export"
    file_format = getattr(options, "format", "ndjson")
    if file_format == "parquet":
        return "a row of a Parquet file is not decoded alone; use `firnline files --reread`, or --export"
    if file_format == "csv" and row["file"] not in file.headers:
        return "a record alone has no header; use `firnline files --reread`, or --export"
    return ""
