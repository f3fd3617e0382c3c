"""`firnline quarantine`: shows records that could not be decoded, reads them again, exports and drops them."""

from __future__ import annotations

import base64
import shlex
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, Annotated

from cyclopts import App, Parameter
from cyclopts.validators import Number

from firnline.cli.common import Common, Flag, Spec, load_pipeline
from firnline.cli.consent import Consent
from firnline.cli.output import count_text, safe_bytes
from firnline.cli.table import Column
from firnline.errors import ConfigError
from firnline.types import Json

if TYPE_CHECKING:
    from firnline.history.quarantine import QuarantineFile
    from firnline.run.open_pipeline import OpenPipeline

FILES_PER_REQUEST = 200
RAW_SHOWN = 80
COLUMNS = (
    Column("epoch", right=True, drop=1),
    Column("reason"),
    Column("file", cut="left"),
    Column("line", right=True),
    Column("raw", cut="right"),
)

PLAN_COLUMNS = (Column("reason"), Column("records", right=True), Column("files", right=True))

EPILOGUE = """\
Shows bad records of committed epochs, newest epoch first, without those that a
later epoch has read again. --pending shows those of the newest epoch that is
not committed: it runs now, or it failed. Reads the table; starts no Spark and
writes nothing, except with --replay and --drop.

--replay decodes the stored bytes again, with the settings of today: the next
epoch, of a running pipeline or of the next run, has these records only. Those
that are bad again stay in quarantine. --drop takes records out of the list
without reading them, e.g. after --export. Both show what they would do, then
ask; the audit trail records it. The ledger names the records, so that each is
read again once; a rollback of that epoch brings them back. Records of CSV files
are decoded with the header of their file, which is stored beside them. Of a
record that was too long only the beginning is stored: raise max_record_bytes
and read its file again, with `firnline files --reread`; so with rows of Parquet
files.

--export writes the stored bytes, one record per line, e.g. to correct them and
to put the file into the source's folder.

Output (JSON: pipeline, more, quarantine [...] with these fields):
  file, line (from 1), record (from 0), reason, epoch, raw (on the screen
  escaped and shortened, in JSON base64)
  With --replay and --drop: pipeline, done, records, left_out, plan [{reason,
  records, files}]
  With --export: pipeline, path, records

Environment:
  FIRNLINE__A__B      overrides the key a.b of the spec

Examples:
  firnline quarantine --reason not-json
  firnline quarantine --replay --file '*/2026-11-*' --yes
  firnline quarantine --export bad.json
"""

app = App(name="quarantine", help_epilogue=EPILOGUE)


@app.default
def quarantine(
    spec: Spec = None,
    *,
    reason: Annotated[str | None, Parameter(help="Only records with this reason. [default: all]")] = None,
    file: Annotated[str | None, Parameter(help="Only records of this file or pattern. [default: all]")] = None,
    epoch: Annotated[int | None, Parameter(help="Only records of this epoch. [default: all]")] = None,
    until_epoch: Annotated[int | None, Parameter(help="Only records of epochs up to this one. [default: all]")] = None,
    limit: Annotated[int, Parameter(help="Maximum number to show; 0 shows all.", validator=Number(gte=0))] = 20,
    pending: Annotated[bool, Flag, Parameter(help="Show records of an epoch that is not committed.")] = False,
    replay: Annotated[bool, Flag, Parameter(help="Decode the records again, in an epoch of their own.")] = False,
    drop: Annotated[bool, Flag, Parameter(help="Take the records out of the list, without reading them.")] = False,
    export: Annotated[
        str | None, Parameter(help="Write the raw records to this file. [default: none]", negative="")
    ] = None,
    consent: Consent = Consent(),
    common: Common = Common(),
) -> int:
    """Show records that could not be decoded, read them again, or export them."""
    chosen = [
        name for name, value in (("pending", pending), ("replay", replay), ("drop", drop), ("export", export)) if value
    ]
    if len(chosen) > 1:
        raise ConfigError(f"--{chosen[0]} and --{chosen[1]} exclude each other", hint="Run the command once for each.")
    if (consent.yes or consent.dry_run) and not (replay or drop):
        raise ConfigError(
            "--yes and --dry-run belong to --replay and --drop", hint="firnline quarantine --replay --dry-run"
        )
    pipeline = load_pipeline(spec)
    from firnline.history.quarantine import load_pending, load_quarantine

    wanted = _Filter(reason, file, epoch, until_epoch)
    if replay or drop:
        return _request(pipeline, wanted, discard=drop, consent=consent, common=common)
    if export is not None:
        return _export(pipeline, wanted, export, common)
    rows = load_pending(pipeline) if pending else load_quarantine(pipeline)
    return _show(pipeline, rows, wanted, limit, common)


@dataclass(frozen=True, slots=True)
class _Filter:
    """Which records a command is about."""

    reason: str | None
    file: str | None
    epoch: int | None
    until_epoch: int | None = None

    @property
    def options(self) -> str:
        """The options that choose these records, up to the given epoch, to be typed again."""
        given = {"--reason": self.reason, "--file": self.file, "--epoch": self.epoch, "--until-epoch": self.until_epoch}
        return "".join(f" {name} {shlex.quote(str(value))}" for name, value in given.items() if value is not None)

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


def _show(pipeline: OpenPipeline, found: Iterable[dict[str, Json]], wanted: _Filter, limit: int, common: Common) -> int:
    records: list[dict[str, Json]] = []
    more = False
    reasons: Counter[str] = Counter()
    for row in found:
        reasons[str(row["reason"])] += 1
        if not wanted.takes(row):
            continue
        if limit and len(records) == limit:
            more = True
            break
        records.append(row)
    if common.json:
        rows = [{**row, "raw": base64.b64encode(row["raw"]).decode()} for row in records]
        common.out.json({"pipeline": pipeline.options.name, "more": more, "quarantine": rows})
    elif records:
        common.out.table(COLUMNS, [{**row, "raw": safe_bytes(row["raw"], RAW_SHOWN)} for row in records])
        if more:
            common.out.line("there are more; --limit 0 shows all")
    elif reasons:
        others = ", ".join(f"{name} ({count:,})" for name, count in sorted(reasons.items()))
        which = f"as {wanted.reason}" if wanted.reason is not None else "that fits"
        common.out.line(f"no record is quarantined {which}; the reasons are: {others}")
    else:
        common.out.line("nothing is quarantined")
    return 0


def _export(pipeline: OpenPipeline, wanted: _Filter, path: str, common: Common) -> int:
    from firnline.history.quarantine import load_quarantine

    # Only what is quarantined now is exported: later records must not be dropped with it.
    newest = pipeline.load().epoch
    until = newest if wanted.until_epoch is None else min(newest, wanted.until_epoch)
    wanted = replace(wanted, until_epoch=until)
    count = 0
    try:
        with open(path, "xb") as out:
            for row in filter(wanted.takes, load_quarantine(pipeline)):
                out.write(row["raw"] + b"\n")
                count += 1
    except FileExistsError as error:
        raise ConfigError(f"{path} exists", hint="Name another file, or delete it.") from error
    except OSError as error:
        raise ConfigError(f"{path} cannot be written: {error.strerror}", hint="Name another file.") from error
    if common.json:
        common.out.json({"pipeline": pipeline.options.name, "path": path, "records": count})
    else:
        common.out.line(f"{count_text(count, 'record')} written to {path}")
        common.out.line("correct them, put the file into the source's folder, then type:")
        common.out.line(f"firnline quarantine --drop{wanted.options}")
    return 0


@dataclass(slots=True)
class _Chosen:
    """The records that a replay or a drop is about."""

    requests: dict[str, list[dict[str, Json]]] = field(default_factory=dict)  # by source: files of the quarantine
    records: Counter[str] = field(default_factory=Counter)  # by reason
    files: dict[str, set[str]] = field(default_factory=dict)  # by reason
    left_out: Counter[str] = field(default_factory=Counter)  # by obstacle


def _choose(pipeline: OpenPipeline, wanted: _Filter, *, discard: bool) -> _Chosen:
    from firnline.history.quarantine import load_quarantine_files

    asked: dict[str, list[list[int]]] = {}  # file of the quarantine -> ranges of rows
    for one in (file for request in pipeline.requests.load() for file in request.files):
        asked.setdefault(str(one["name"]), []).extend(one["rows"])
    chosen = _Chosen()
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


def _request(pipeline: OpenPipeline, wanted: _Filter, *, discard: bool, consent: Consent, common: Common) -> int:
    """Show which records would be read again or dropped, and request it once that is confirmed."""
    chosen = _choose(pipeline, wanted, discard=discard)
    total = chosen.records.total()
    plan = [
        {"reason": reason, "records": count, "files": len(chosen.files[reason])}
        for reason, count in sorted(chosen.records.items())
    ]
    facts = {"pipeline": pipeline.options.name, "records": total, "left_out": dict(chosen.left_out), "plan": plan}
    if common.json:
        if not total or not consent.decided:
            common.out.json({**facts, "done": False})
    else:
        if plan:
            common.out.table(PLAN_COLUMNS, plan)
        for obstacle, count in sorted(chosen.left_out.items()):
            common.out.line(f"{count_text(count, 'record')} left out: {obstacle}")
    if not total:
        if not common.json:
            common.out.line("no record is left to " + ("drop" if discard else "read again"))
        return 0
    number = count_text(total, "record")
    if not consent.is_given(f"Drop {number}" if discard else f"Read {number} again", common.out):
        return 0
    _ask(pipeline, chosen, discard=discard)
    if common.json:
        common.out.json({**facts, "done": True})
    else:
        common.out.line(f"the next epoch drops {number}" if discard else f"the next epoch decodes {number} again")
    return 0


def _ask(pipeline: OpenPipeline, chosen: _Chosen, *, discard: bool) -> None:
    from firnline.history.store import on_record

    what = "quarantine-drop" if discard else "quarantine-replay"
    run, newest, total = pipeline.ids.new(), pipeline.load().epoch, chosen.records.total()
    with on_record(pipeline, what, run, from_epoch=newest, to_epoch=None, records=total):
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
