"""`firnline quarantine`: shows records that could not be decoded, reads them again, exports and drops them."""

from __future__ import annotations

import base64
from collections import Counter
from collections.abc import Iterable
from dataclasses import replace
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
    from firnline.history.quarantine_requests import RecordFilter
    from firnline.run.open_pipeline import OpenPipeline

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
    from firnline.history.quarantine_requests import RecordFilter

    wanted = RecordFilter(reason, file, epoch, until_epoch)
    if replay or drop:
        return _request(pipeline, wanted, discard=drop, consent=consent, common=common)
    if export is not None:
        return _export(pipeline, wanted, export, common)
    rows = load_pending(pipeline) if pending else load_quarantine(pipeline)
    show_records(pipeline.options.name, rows, wanted, limit, common)
    return 0


def show_records(
    pipeline: str, found: Iterable[dict[str, Json]], wanted: RecordFilter, limit: int, common: Common
) -> None:
    """Show records of the quarantine, at most `limit` of them; 0 shows all."""
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
        common.out.json({"pipeline": pipeline, "more": more, "quarantine": rows})
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


def _export(pipeline: OpenPipeline, wanted: RecordFilter, path: str, common: Common) -> int:
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


def _request(pipeline: OpenPipeline, wanted: RecordFilter, *, discard: bool, consent: Consent, common: Common) -> int:
    """Show which records would be read again or dropped, and request it once that is confirmed."""
    from firnline.history.quarantine_requests import ask_records, choose_records

    chosen = choose_records(pipeline, wanted, discard=discard)
    total = chosen.records.total()
    facts = {"pipeline": pipeline.options.name, **chosen.to_json()}
    if common.json:
        if not total or not consent.decided:
            common.out.json({**facts, "done": False})
    else:
        if facts["plan"]:
            common.out.table(PLAN_COLUMNS, facts["plan"])
        for obstacle, count in sorted(chosen.left_out.items()):
            common.out.line(f"{count_text(count, 'record')} left out: {obstacle}")
    if not total:
        if not common.json:
            common.out.line("no record is left to " + ("drop" if discard else "read again"))
        return 0
    number = count_text(total, "record")
    if not consent.is_given(f"Drop {number}" if discard else f"Read {number} again", common.out):
        return 0
    ask_records(pipeline, chosen, pipeline.ids.new(), discard=discard)
    if common.json:
        common.out.json({**facts, "done": True})
    else:
        common.out.line(f"the next epoch drops {number}" if discard else f"the next epoch decodes {number} again")
    return 0
