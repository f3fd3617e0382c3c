"""`firnline checkpoints delete`: deletes the checkpoint store's copies; the table keeps its own."""

from __future__ import annotations

from contextlib import closing
from typing import TYPE_CHECKING, Annotated

from cyclopts import App, Parameter

from firnline.cli.common import Common, Flag, Spec, load_pipeline
from firnline.cli.output import count_text, size_text

if TYPE_CHECKING:
    from firnline.types import Json

EPILOGUE = """\
Deletes every version of this pipeline's checkpoint from the checkpoint store.
Table, ledger and audit trail stay, so the pipeline continues from its newest
epoch. Checkpoints that the ledger has folded can then no longer be shown.

Output (JSON fields):
  pipeline, status (deleted, would_delete, nothing_there), versions, size_bytes,
  epoch (the newest among them), place

Environment:
  FIRNLINE__A__B      overrides the key a.b of the spec

Examples:
  firnline checkpoints delete --dry-run
  firnline checkpoints delete flights.yml --yes
"""

app = App(name="delete", help_epilogue=EPILOGUE)


@app.default
def delete(
    spec: Spec = None,
    /,
    *,
    dry_run: Annotated[bool, Flag, Parameter(help="Only show what would be deleted, even with --yes.")] = False,
    yes: Annotated[bool, Flag, Parameter(help="Delete; without it nothing is deleted.")] = False,
    common: Common = Common(),
) -> int:
    """Delete the checkpoint store's copies; the table keeps its own."""
    pipeline = load_pipeline(spec)
    from firnline.history.store import open_for_writing
    from firnline.stores.audit import audited, make_record
    from firnline.stores.transfer import count_versions

    name = pipeline.options.name
    really = yes and not dry_run
    with closing(open_for_writing(pipeline)) as store:
        held, place = count_versions(store, name), store.place
        if held.versions and really:
            details = {"versions": held.versions, "place": place}
            with audited(store, make_record(name, "delete", from_epoch=held.epoch, details=details)):
                store.delete(name)
    status = ("deleted" if really else "would_delete") if held.versions else "nothing_there"
    facts: dict[str, Json] = {
        "pipeline": name,
        "status": status,
        "versions": held.versions,
        "size_bytes": held.size_bytes,
        "epoch": held.epoch,
        "place": place,
    }
    if common.json:
        common.out.json(facts)
    elif not held.versions:
        common.out.line(f"{place} has no checkpoint of {name}")
    else:
        verb = "deleted" if really else "would delete"
        common.out.line(
            f"{verb} {count_text(held.versions, 'version')}, {size_text(held.size_bytes)}, of {name} in {place}"
        )
        if not really and not dry_run:
            common.out.line("add --yes to delete them")
    return 0
