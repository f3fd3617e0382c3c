"""`firnline checkpoints import`: the checkpoints of an exported file into the checkpoint store."""

from __future__ import annotations

from contextlib import closing
from typing import Annotated

from cyclopts import App, Parameter

from firnline.cli.common import Common, Flag, Spec, load_pipeline
from firnline.cli.output import count_text

EPILOGUE = """\
Checks the whole file first: names, sizes, checksums, and that it fits the
table, which is the truth. Then puts the versions that the checkpoint store
lacks, oldest first. A file that does not continue what the store has, tells of
another history or of more than the table holds is refused, and nothing is put.
Never touches the table. Run it again after a kill: what is there is left out.

Output (JSON fields):
  file, pipeline, status (imported, would_import, already_there), versions (in
  the file), put, already_there, older (before what the store has: left out),
  audit (records put), store_epoch, archive_epoch, place

Environment:
  FIRNLINE__A__B      overrides the key a.b of the spec

Examples:
  firnline checkpoints import flights.tar --dry-run
  firnline checkpoints import /backup/flights.tar flights.yml
"""

app = App(name="import", help_epilogue=EPILOGUE)


@app.default
def import_(
    file: Annotated[str, Parameter(help="A file that `checkpoints export` wrote.")],
    spec: Spec = None,
    /,
    *,
    dry_run: Annotated[bool, Flag, Parameter(help="Check everything and put nothing.")] = False,
    common: Common = Common(),
) -> int:
    """Put the checkpoints of an exported file into the checkpoint store."""
    pipeline = load_pipeline(spec)
    from firnline.history.store import load_truth, open_for_writing
    from firnline.stores.archive import open_archive
    from firnline.stores.audit import make_record
    from firnline.stores.transfer import perform_import, plan_import

    with open_archive(file) as archive, closing(open_for_writing(pipeline)) as store:
        plan = plan_import(store, archive, pipeline.options.name, load_truth(pipeline))
        if plan.is_needed and not dry_run:
            details = {"file": file, "versions": len(plan.put), "audit": len(plan.audit)}
            begun = make_record(
                plan.pipeline, "import", from_epoch=plan.store_epoch, to_epoch=plan.archive_epoch, details=details
            )
            perform_import(store, archive, plan, begun)
        place = store.place
    status = ("would_import" if dry_run else "imported") if plan.is_needed else "already_there"
    if common.json:
        common.out.json(
            {
                "file": file,
                "pipeline": plan.pipeline,
                "status": status,
                "versions": plan.versions,
                "put": len(plan.put),
                "already_there": plan.already_there,
                "older": plan.older,
                "audit": len(plan.audit),
                "store_epoch": plan.store_epoch,
                "archive_epoch": plan.archive_epoch,
                "place": place,
            }
        )
        return 0
    if not plan.is_needed:
        common.out.line(f"nothing to put: {place} has all of it")
        return 0
    verb = "would put" if dry_run else "put"
    told = f"{count_text(len(plan.put), 'checkpoint')} and {count_text(len(plan.audit), 'audit record')}"
    common.out.line(f"{verb} {told} into {place}; {plan.already_there:,} already there")
    if plan.older:
        common.out.line(f"left out {count_text(plan.older, 'checkpoint')} from before what the store has")
    return 0
