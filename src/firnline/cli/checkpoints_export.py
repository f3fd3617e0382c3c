"""`firnline checkpoints export`: the checkpoints and the audit trail as one file."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

from cyclopts import App, Parameter

from firnline.cli.common import Common, Flag, Spec, load_pipeline
from firnline.cli.output import count_text, size_text

if TYPE_CHECKING:
    from firnline.types import Json

EPILOGUE = """\
Writes a plain tar file: manifest.json, then every version that the checkpoint
store has, byte for byte, and the audit trail. Without a store, or while it is
empty, the file gets what the ledger tells of the epochs that are not folded
yet. Versions that are damaged are left out and named.

Output (JSON fields):
  file, pipeline, created_at, origin (file, sqlite, postgres, object, ledger),
  versions, audit, size_bytes, left_out [...]

Environment:
  FIRNLINE__A__B      overrides the key a.b of the spec

Examples:
  firnline checkpoints export flights.tar
  firnline checkpoints export /backup/flights.tar flights.yml --yes
"""

app = App(name="export", help_epilogue=EPILOGUE)


@app.default
def export(
    file: Annotated[str, Parameter(help="The file to write.")],
    spec: Spec = None,
    /,
    *,
    yes: Annotated[bool, Flag, Parameter(help="Replace the file if it is there already.")] = False,
    common: Common = Common(),
) -> int:
    """Write the checkpoints and the audit trail into one file."""
    pipeline = load_pipeline(spec)
    from firnline.history.store import export_checkpoints

    manifest = export_checkpoints(pipeline, file, replace=yes)
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
        return 0
    told = f"{count_text(facts['versions'], 'checkpoint')}, {count_text(facts['audit'], 'audit record')}"
    source = "the ledger" if manifest.origin == "ledger" else "the checkpoint store"
    common.out.line(f"{file}: {told}, {size_text(facts['size_bytes'])}, from {source}")
    for name in manifest.left_out:
        common.out.line(f"left out: {name}")
    return 0
