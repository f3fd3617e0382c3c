"""Finds another tool's progress in a Delta log: `blizzard:` transactions only, newest first."""

from __future__ import annotations

from firnline.errors import CheckpointError, DamagedError
from firnline.sinks.delta.log import DeltaLog, decode_blizzard
from firnline.storage import Storage
from firnline.types import Json


def find_foreign(storage: Storage, version: int, scan_commits: int, *, accept_older: bool) -> Json | None:
    """The newest `source_state` within `scan_commits` commits; None when no other tool left one.

    Commits of Firnline pipelines carry the same ids for other tools to read; they name their pipeline, and are
    not another tool's progress.

    Raises:
        CheckpointError: the newest one is damaged, and an older one may be used only with `--accept-duplicates`.
    """
    for commit in DeltaLog(storage).backwards(version, scan_commits):
        app_id = commit.blizzard()
        if app_id is None:
            continue
        try:
            value = decode_blizzard(app_id)
        except DamagedError as error:
            if accept_older:
                continue
            raise CheckpointError(
                f"the newest checkpoint of the other tool (table version {commit.version}) is damaged",
                hint="Run with --accept-duplicates to go on from the one before: its last batch may be read twice.",
            ) from error
        if "pipeline" in value:
            continue
        return value["source_state"]
    return None
