"""`firnline files`: lists every known file with its state; retries or drops files that were set aside; reads finished
files again."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Annotated, Literal

from cyclopts import App, Parameter
from cyclopts.validators import Number

from firnline.cli.common import Common, Flag, Spec, load_pipeline
from firnline.cli.consent import Consent
from firnline.cli.output import count_text
from firnline.cli.table import Column
from firnline.errors import ConfigError

if TYPE_CHECKING:
    from firnline.run.open_pipeline import OpenPipeline
    from firnline.types import Json

Status = Literal["pending", "in_progress", "committed", "grown", "changed", "late", "set_aside", "ignored", "dropped"]

COLUMNS = (
    Column("path", cut="left"),
    Column("status"),
    Column("size_bytes", "bytes", right=True, drop=3),
    Column("records", right=True, drop=1),
    Column("epoch", right=True, drop=2),
    Column("table_version", "version", right=True, drop=4),
    Column("reason", cut="right"),
)

DROP_COLUMNS = (Column("path", cut="left"), Column("reason", cut="right"))

EPILOGUE = """\
Reads the ledger in the table and a listing of the source; starts no Spark and
changes no data. --retry writes a request beside the table; the next epoch, of a
running pipeline or of the next run, reads the file again. Repeating a request
changes nothing.

--drop gives up files that were set aside: they count as finished and are never
read again; records already read from them stay in the table. It takes names as
--retry does, or patterns of full names (`*` crosses folders), and is
repeatable. It lists the files, then asks; the audit trail records it. A
rollback to before that epoch undoes it.

--reread reads a file that was read to its end once more, from its beginning, as
it is now: after a correction, or with other settings. It shows the plan (the
records that were read before and come twice, or are overwritten by an upsert),
then asks; the audit trail records it. A rollback to before that epoch undoes
it.

Output (JSON: pipeline, total, files [...] with these fields):
  path, size_bytes, create_time, discovery_time, processed_time, commit_time,
  status (pending, in_progress, committed, grown, changed, late, set_aside,
  ignored, dropped), epoch, table_version, records, reason
  grown, changed: the file grew, or was replaced, after it was read
  With --retry: path, changed, status (asked, already_asked, would_ask)
  reread (asked: a reread waits; done: the newest reading was one; or null)
  With --drop: pipeline, done, files [{path, reason}]
  With --reread: pipeline, done, path, source, changed, size_bytes, records,
  epochs [{epoch, records}], effect (doubled, overwritten), operators

Environment:
  FIRNLINE__A__B      overrides the key a.b of the spec

Examples:
  firnline files --status set_aside
  firnline files --retry /data/in/2026-11-01.json.gz --changed
  firnline files --drop '/data/in/broken-*' --yes
  firnline files --reread /data/in/2026-11-02.json --yes
"""

app = App(name="files", help_epilogue=EPILOGUE)


@app.default
def files(
    spec: Spec = None,
    *,
    status: Annotated[Status | None, Parameter(help="Only files in this state. [default: all]")] = None,
    limit: Annotated[int, Parameter(help="Maximum number to list; 0 lists all.", validator=Number(gte=0))] = 100,
    retry: Annotated[
        str | None, Parameter(help="Read this file again: its path as listed. [default: none]", negative="")
    ] = None,
    changed: Annotated[bool, Flag, Parameter(help="With --retry: accept that the file was replaced.")] = False,
    drop: Annotated[
        list[str] | None,
        Parameter(help="Give up a file that was set aside, by name or pattern; repeatable.", negative=""),
    ] = None,
    reread: Annotated[
        str | None,
        Parameter(
            help="Read a finished file from its beginning again: its path as listed. [default: none]", negative=""
        ),
    ] = None,
    consent: Consent = Consent(),
    common: Common = Common(),
) -> int:
    """List files with their state, retry or drop files that were set aside, or read a finished file again."""
    if reread is not None and (retry is not None or drop):
        raise ConfigError("--reread, --retry and --drop exclude each other", hint="Run the command once for each.")
    if changed and retry is None:
        raise ConfigError("--changed belongs to --retry", hint="firnline files --retry PATH --changed")
    if (consent.yes or consent.dry_run) and not drop and retry is None and reread is None:
        raise ConfigError(
            "--yes and --dry-run belong to --drop, --retry and --reread", hint="firnline files --drop PATH --dry-run"
        )
    if drop and retry is not None:
        raise ConfigError("--drop and --retry exclude each other", hint="Run the command once for each.")
    pipeline = load_pipeline(spec)
    if reread is not None:
        return _reread(pipeline, reread, consent=consent, common=common)
    if drop:
        return _drop(pipeline, drop, consent=consent, common=common)
    if retry is not None:
        return _retry(pipeline, retry, changed=changed, dry_run=consent.dry_run, common=common)
    from firnline.history.status import load_files

    rows: list[dict[str, Json]] = []
    total = 0
    for row in load_files(pipeline):
        if status is None or row["status"] == status:
            total += 1
            if not limit or total <= limit:
                rows.append(row)
    show_files(pipeline.options.name, rows, total, status, common)
    return 0


def show_files(pipeline: str, rows: list[dict[str, Json]], total: int, status: str | None, common: Common) -> None:
    """Show files with their state, of `total` that there are."""
    if common.json:
        common.out.json({"pipeline": pipeline, "total": total, "files": rows})
    elif rows:
        common.out.table(COLUMNS, rows)
        if total > len(rows):
            common.out.line(f"{total - len(rows):,} more; --limit 0 lists all {total:,}")
    else:
        common.out.line("no files" if status is None else f"no file is {status}")


def _retry(pipeline: OpenPipeline, path: str, *, changed: bool, dry_run: bool, common: Common) -> int:
    from firnline.history.file_requests import ask_retry, find_set_aside, is_retry_asked

    name = find_set_aside(pipeline, path)
    asked = is_retry_asked(pipeline, name, changed=changed)
    if not asked and not dry_run:
        ask_retry(pipeline, name, pipeline.ids.new(), changed=changed)
    status = "already_asked" if asked else "would_ask" if dry_run else "asked"
    if common.json:
        common.out.json({"path": name, "changed": changed, "status": status})
    else:
        would = "would be read again; nothing was changed" if dry_run else "the next epoch reads it again"
        common.out.line(f"{name}: {'already requested' if asked else would}")
    return 0


def _reread(pipeline: OpenPipeline, path: str, *, consent: Consent, common: Common) -> int:
    from firnline.history.file_requests import ask_reread
    from firnline.history.reread import plan_reread

    plan = plan_reread(pipeline, path)
    facts = {"pipeline": pipeline.options.name, **plan.to_json()}
    if not common.json:
        show_reread(facts, common)
    elif not consent.decided:
        common.out.json({**facts, "done": False})
    if not consent.is_given(f"Read {plan.path} again", common.out):
        return 0
    is_new = ask_reread(pipeline, plan, pipeline.ids.new())
    if common.json:
        common.out.json({**facts, "done": True})
    else:
        common.out.line("the next epoch reads it again" if is_new else "already requested")
    return 0


def show_reread(plan: Mapping[str, Json], common: Common) -> None:
    """Show the plan to read a finished file again."""
    state = "changed since it was read" if plan["changed"] else "the same as when it was read"
    common.out.line(f"{plan['path']}: {state}")
    epochs = ", ".join(f"{count_text(one['records'], 'record')} in epoch {one['epoch']}" for one in plan["epochs"])
    if plan["effect"] == "overwritten":
        common.out.line(f"read before: {epochs or 'nothing'}; rows with the same key are overwritten")
    else:
        common.out.line(f"read before: {epochs or 'nothing'}; their rows stay, and those of the file come twice")
    if plan["operators"]:
        common.out.line(f"operators that take the records again: {', '.join(plan['operators'])}")


def _drop(pipeline: OpenPipeline, wanted: list[str], *, consent: Consent, common: Common) -> int:
    from firnline.history.file_requests import ask_drop, plan_drop

    plan = plan_drop(pipeline, wanted)
    rows = plan.rows()
    if not common.json:
        common.out.table(DROP_COLUMNS, rows)
    elif not consent.decided:
        common.out.json({"pipeline": pipeline.options.name, "done": False, "files": rows})
    confirmed = consent.is_given(f"Give up {count_text(len(rows), 'file')}", common.out)
    if confirmed:
        ask_drop(pipeline, plan, pipeline.ids.new())
    if not common.json and confirmed:
        common.out.line("the next epoch drops them")
    elif confirmed:
        common.out.json({"pipeline": pipeline.options.name, "done": True, "files": rows})
    return 0
