"""Finds another tool's progress in a Delta log: `blizzard:` transactions only, newest first."""

from __future__ import annotations

from firnline.errors import CheckpointError, CheckpointLostError, DamagedError
from firnline.names import BLIZZARD
from firnline.sinks.delta.log import DeltaCheckpoint, DeltaLog, decode_blizzard
from firnline.storage import Storage
from firnline.types import Json


def find_foreign(storage: Storage, version: int, scan_commits: int, *, accept_older: bool) -> Json | None:
    """The newest `source_state` in the log; None when the log proves that it holds none.

    Commits are read backwards, at most `scan_commits` of them, down to Delta's own checkpoint, which keeps the
    transactions of all commits before it. Commits of Firnline pipelines carry the same ids for other tools to read;
    they name their pipeline, and are not another tool's progress.

    Raises:
        CheckpointError: the newest one is damaged, and an older one may be used only with `--accept-duplicates`.
        CheckpointLostError: a part of the log was not read or is gone, so that nobody knows whether it holds one;
            going on without it needs `--accept-duplicates`, too.
    """
    log = DeltaLog(storage)
    checkpoint = log.find_checkpoint()
    lowest = checkpoint.version if checkpoint is not None and checkpoint.version <= version else -1
    unread = version
    for commit in log.backwards(version, min(scan_commits, version - lowest)):
        unread = commit.version - 1
        app_id = commit.blizzard()
        if app_id is not None:
            value = _decode(app_id, commit.version, accept_older=accept_older)
            if value is not None:
                return value["source_state"]
    if unread > lowest and not accept_older:
        raise _unread_error(storage.root, version - lowest, unread)
    if checkpoint is None:
        return None
    kept = _kept_ids(log, checkpoint, accept_older=accept_older)
    found = [_decode(app_id, checkpoint.version, accept_older=accept_older) for app_id in kept]
    newest = max((value for value in found if value), key=lambda v: int(v["delta_version"]), default=None)
    return newest["source_state"] if newest else None


def _unread_error(root: str, commits: int, unread: int) -> CheckpointLostError:
    return CheckpointLostError(
        f"{root} has rows, and whether another tool left its progress in its log is not known: version {unread} and"
        " those before it were not read, or are gone",
        hint=f"Set checkpoint.recovery_scan_commits: {commits} to read them all, or have Delta write a checkpoint of"
        " the table. To start at the beginning of the input all the same: firnline run --accept-duplicates",
        version=unread,
    )


def _decode(app_id: str, version: int, *, accept_older: bool) -> dict[str, Json] | None:
    """The payload in a commit, or in a checkpoint; None when it is a Firnline pipeline's, or damaged and accepted.

    The version that it was made onto lies before the one that holds it, or it was made for another table.
    """
    try:
        value = decode_blizzard(app_id)
        if int(value.setdefault("delta_version", -1)) > version:
            raise DamagedError(f"it names version {value['delta_version']}", version=version)
    except (DamagedError, TypeError, ValueError) as error:
        if accept_older:
            return None
        reason = error.message if isinstance(error, DamagedError) else str(error)
        raise CheckpointError(
            f"the newest checkpoint of the other tool (table version {version}) is damaged: {reason}",
            hint="Run with --accept-duplicates to go on from the one before: its last batch may be read twice.",
        ) from error
    return None if "pipeline" in value else value


def _kept_ids(log: DeltaLog, checkpoint: DeltaCheckpoint, *, accept_older: bool) -> list[str]:
    try:
        return [str(t["appId"]) for t in log.checkpoint_txns(checkpoint) if str(t["appId"]).startswith(BLIZZARD)]
    except (DamagedError, FileNotFoundError) as error:
        if accept_older:
            return []
        raise CheckpointError(
            f"Delta's checkpoint of version {checkpoint.version}, which may hold another tool's progress, is damaged",
            hint="Have the other tool write a new one; to start at the beginning of the input all the same:"
            " firnline run --accept-duplicates",
        ) from error
