"""`firnline checkpoints export` and `import`: checkpoints and audit trail as one file, out of and into a store."""

from __future__ import annotations

import os
from contextlib import closing
from typing import TYPE_CHECKING, Annotated

from cyclopts import App, Parameter

from firnline.cli.common import Common, Flag, Spec, load_pipeline
from firnline.cli.consent import NoQuestion
from firnline.cli.output import count_text, size_text
from firnline.errors import ConfigError

if TYPE_CHECKING:
    from firnline.run.open_pipeline import OpenPipeline
    from firnline.stores.archive import Manifest
    from firnline.types import Json

EXPORT_EPILOGUE = """\
Writes a plain tar file: manifest.json, then every version in the checkpoint
store, byte for byte, and the audit trail. If there is no store, or it is empty,
the file gets the epochs that the ledger has not folded yet. Damaged versions
are left out and listed.

Output (JSON fields):
  file, pipeline, created_at, origin (file, sqlite, postgres, object, ledger),
  versions, audit, size_bytes, left_out [...]; with --dry-run file, pipeline,
  origin, versions (null: of the ledger), dry_run

Environment:
  FIRNLINE__A__B      overrides the key a.b of the spec

Examples:
  firnline checkpoints export flights.tar
  firnline checkpoints export /backup/flights.tar flights.yml --yes
"""

IMPORT_EPILOGUE = """\
Checks the whole file first: names, sizes, checksums, and that it matches the
table, which is the truth. Then writes the versions that the checkpoint store
lacks, oldest first. The command refuses a file that does not continue what the
store has, or that holds another history or more than the table, and writes
nothing. It never touches the table. Run it again after a kill: versions that
are already in the store are skipped.

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

export_app = App(name="export", help_epilogue=EXPORT_EPILOGUE)
import_app = App(name="import", help_epilogue=IMPORT_EPILOGUE)


@export_app.default
def export(
    file: Annotated[str, Parameter(help="The file to write.")],
    /,
    spec: Spec = None,
    *,
    yes: Annotated[bool, Flag, Parameter(help="Replace the file if it already exists.")] = False,
    dry_run: Annotated[bool, Flag, Parameter(help="Only show what would be written, even with --yes.")] = False,
    common: Common = Common(),
) -> int:
    """Write the checkpoints and the audit trail into one file."""
    pipeline = load_pipeline(spec)
    if dry_run:
        return _plan_export(pipeline, file, replace=yes, common=common)
    from firnline.history.store import export_checkpoints

    show_exported(file, export_checkpoints(pipeline, file, replace=yes), common)
    return 0


def show_exported(file: str, manifest: Manifest, common: Common) -> None:
    """Show what an archive of checkpoints holds."""
    members = manifest.members
    facts: dict[str, Json] = {
        "file": file,
        "pipeline": manifest.pipeline,
        "created_at": manifest.created_at,
        "origin": manifest.origin,
        "versions": sum(1 for member in members if member.part == "checkpoints"),
        "audit": sum(1 for member in members if member.part == "audit"),
        "size_bytes": sum(member.size_bytes for member in members),
        "left_out": list(manifest.left_out),
    }
    if common.json:
        common.out.json(facts)
        return
    contents = f"{count_text(facts['versions'], 'checkpoint')}, {count_text(facts['audit'], 'audit record')}"
    origin = "the ledger" if manifest.origin == "ledger" else "the checkpoint store"
    common.out.line(f"{file}: {contents}, {size_text(facts['size_bytes'])}, from {origin}")
    for name in manifest.left_out:
        common.out.line(f"left out: {name}")


def _plan_export(pipeline: OpenPipeline, file: str, *, replace: bool, common: Common) -> int:
    """Show what an export would write; refuses what the export would refuse."""
    if os.path.lexists(file) and not replace:
        raise ConfigError(f"{file} already exists", hint="Add --yes to replace it, or name another file.")
    from firnline.history.store import find_store
    from firnline.stores.transfer import Extent, count_versions

    store = find_store(pipeline)
    stored = Extent()
    if store is not None:
        with closing(store):
            stored = count_versions(store, pipeline.options.name)
    origin = store.kind if store is not None and stored.versions else "ledger"
    if common.json:
        facts = {"file": file, "pipeline": pipeline.options.name, "origin": origin, "versions": stored.versions or None}
        common.out.json({**facts, "dry_run": True})
        return 0
    versions = count_text(stored.versions, "checkpoint") if stored.versions else "the epochs of the ledger"
    common.out.line(f"would write {versions} to {file}; nothing was changed")
    return 0


@import_app.default
def import_(
    file: Annotated[str, Parameter(help="A file that `checkpoints export` wrote.")],
    /,
    spec: Spec = None,
    *,
    options: NoQuestion = NoQuestion(),
    common: Common = Common(),
) -> int:
    """Import the checkpoints of an exported file into the checkpoint store."""
    pipeline = load_pipeline(spec)
    from firnline.history.store import load_truth, open_for_writing
    from firnline.stores.archive import open_archive
    from firnline.stores.audit import make_record
    from firnline.stores.transfer import perform_import, plan_import

    with open_archive(file) as archive, closing(open_for_writing(pipeline)) as store:
        plan = plan_import(store, archive, pipeline.options.name, load_truth(pipeline))
        if plan.is_needed and not options.dry_run:
            details = {"file": file, "versions": len(plan.put), "audit": len(plan.audit)}
            begun = make_record(
                plan.pipeline, "import", from_epoch=plan.store_epoch, to_epoch=plan.archive_epoch, details=details
            )
            perform_import(store, archive, plan, begun)
        location = store.place
    status = ("would_import" if options.dry_run else "imported") if plan.is_needed else "already_there"
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
                "place": location,
            }
        )
        return 0
    if not plan.is_needed:
        common.out.line(f"nothing to import: {location} has all of it")
        return 0
    verb = "would import" if options.dry_run else "imported"
    contents = f"{count_text(len(plan.put), 'checkpoint')} and {count_text(len(plan.audit), 'audit record')}"
    common.out.line(f"{verb} {contents} into {location}; {plan.already_there:,} already there")
    if plan.older:
        common.out.line(f"left out {count_text(plan.older, 'checkpoint')} from before what the store has")
    return 0
