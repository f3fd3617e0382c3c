"""`firnline compact`: rewrites small files as large ones, without disturbing ingestion."""

from __future__ import annotations

import re
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated, Any

from cyclopts import App, Parameter
from cyclopts.validators import Number

from firnline.cli.common import Common, Flag, Size, TableOrSpec, find_other_sinks, find_pipeline, find_targets
from firnline.cli.consent import NoQuestion
from firnline.cli.output import Output, count_text, size_text
from firnline.errors import ConfigError

if TYPE_CHECKING:
    from firnline.maintenance.compact import CompactReport
    from firnline.maintenance.gc import VacuumReport

_FILTER = re.compile(r"([^<>=!]+?)\s*(<=|>=|!=|=|<|>)\s*(.*)")

EPILOGUE = """\
Rewrites the small files of each partition as files of about the target size, in
several commits with dataChange: false. On a conflict the compaction gives way:
ingestion and the committer never fail because of it. --vacuum then deletes
removed files after their retention, except files that a pin or a unit names.

Output (JSON fields):
  table, version, files_removed, files_added, bytes_removed, bytes_added, rows,
  commits, conflicts, attempts, files_skipped, stopped, dry_run (then the files
  and bytes are those of the plan); with --vacuum also
  vacuum {files, size_bytes, retention_hours, kept, notes, ...}; of a spec with
  several tables  tables [{...}], one of these per table

Environment:
  FIRNLINE__A__B      overrides the key a.b of the spec

Examples:
  firnline compact /lake/flights
  firnline compact /lake/flights --partition 'month>=2026-11' --vacuum
"""

TARGET_SIZE = Size(128 * 1024 * 1024)

app = App(name="compact", help_epilogue=EPILOGUE)


@app.default
def compact(
    table: TableOrSpec = None,
    *,
    target_size: Annotated[Size, Parameter(help="Target size of files.", validator=Number(gte=1))] = TARGET_SIZE,
    target_size_mb: Annotated[
        int | None, Parameter(help="The older form, in MiB.", show=False, validator=Number(gte=1))
    ] = None,
    partition: Annotated[
        tuple[str, ...], Flag, Parameter(help="Only matching partitions, e.g. month=2026-11; repeatable.")
    ] = (),
    vacuum: Annotated[bool, Flag, Parameter(help="Then delete removed files after their retention.")] = False,
    options: NoQuestion = NoQuestion(),
    common: Common = Common(),
) -> int:
    """Rewrite small files as large ones, without disturbing ingestion."""
    filters = [_filter(text) for text in partition]
    targets, pipeline = [one for one in find_targets(table) if not one.is_journal], find_pipeline(table)
    from firnline.cli.long_task import long_task
    from firnline.history.store import deletion_on_record
    from firnline.maintenance.compact import compact as rewrite
    from firnline.maintenance.gc import vacuum as sweep

    bodies: list[dict[str, Any]] = []
    tables = [target.uri for target in targets]
    recorded = None if options.dry_run else pipeline
    with long_task() as task, deletion_on_record(recorded, "compact", tables=tables, vacuum=vacuum) as record:
        for target in targets:
            if task.stopping():
                break
            uri, access = target.uri, target.storage_options
            report = rewrite(
                uri,
                access,
                target_bytes=target_size if target_size_mb is None else target_size_mb * 1024 * 1024,
                partitions=filters or None,
                dry_run=options.dry_run,
                progress=task.progress,
                stop=task.stopping,
            )
            swept = (
                sweep(
                    uri,
                    access,
                    dry_run=options.dry_run,
                    ledgers=target.ledgers,
                    progress=task.progress,
                    stop=task.stopping,
                )
                if vacuum
                else None
            )
            bodies.append({**asdict(report), "vacuum": asdict(swept)} if swept else asdict(report))
            record["files_replaced"] = record.get("files_replaced", 0) + report.files_removed
            record["files_vacuumed"] = record.get("files_vacuumed", 0) + (swept.files if swept else 0)
            if not common.json:
                task.clear()
                if len(targets) > 1:
                    common.out.line(report.table)
                _show(common.out, report, swept)
    if not common.json:
        for sink in find_other_sinks(pipeline):
            common.out.line(f"{sink}: nothing to compact in a sink of this kind")
    else:
        common.out.json(bodies[0] if len(targets) == 1 else {"tables": bodies})
    return 0


def _show(out: Output, report: CompactReport, swept: VacuumReport | None) -> None:
    if report.dry_run:
        files = f"{count_text(report.files_removed, 'file')} ({size_text(report.bytes_removed)})"
        out.line(f"{files} would become {count_text(report.files_added, 'file')}; nothing was changed")
        if swept is not None:
            out.line(f"would vacuum {count_text(swept.files, 'file')}, {size_text(swept.size_bytes)}")
        return
    out.line(
        f"{count_text(report.files_removed, 'file')} ({size_text(report.bytes_removed)}) became "
        f"{count_text(report.files_added, 'file')} ({size_text(report.bytes_added)}) in "
        f"{count_text(report.commits, 'commit')}"
    )
    if swept is not None:
        out.line(f"vacuumed {count_text(swept.files, 'file')}, {size_text(swept.size_bytes)}")
        for note in swept.notes:
            out.line(note)
    if report.stopped:
        out.line("stopped before the end; run again to continue")


def _filter(text: str) -> tuple[str, str, str]:
    match = _FILTER.fullmatch(text.strip())
    if match is None:
        raise ConfigError(f"--partition {text}: not a filter", hint="Write it as month=2026-11 or 'month>=2026-11'.")
    return match[1], match[2], match[3]
