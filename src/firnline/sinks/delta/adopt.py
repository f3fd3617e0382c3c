"""Finds another tool's progress in a Delta log: `blizzard:` transactions only, newest first."""

from __future__ import annotations

import pyarrow as pa
import pyarrow.parquet as pq

from firnline.errors import CheckpointError, DamagedError
from firnline.sinks.delta.log import BLIZZARD, DeltaLog, decode_blizzard
from firnline.storage import Storage
from firnline.types import Json


def find_foreign(storage: Storage, version: int, scan_commits: int, *, accept_older: bool) -> Json | None:
    """The newest `source_state` within `scan_commits` commits, or else in Delta's own checkpoint; None without one.

    Commits of Firnline pipelines carry the same ids for other tools to read; they name their pipeline, and are
    not another tool's progress.

    Raises:
        CheckpointError: the newest one is damaged, and an older one may be used only with `--accept-duplicates`.
    """
    for commit in DeltaLog(storage).backwards(version, scan_commits):
        app_id = commit.blizzard()
        if app_id is not None:
            value = _decode(app_id, f"table version {commit.version}", accept_older=accept_older)
            if value is not None:
                return value["source_state"]
    found = [_decode(app_id, "in a Delta checkpoint", accept_older=accept_older) for app_id in _kept_ids(storage)]
    newest = max((value for value in found if value), key=lambda v: int(v["delta_version"]), default=None)
    return newest["source_state"] if newest else None


def _decode(app_id: str, where: str, *, accept_older: bool) -> dict[str, Json] | None:
    """The payload; None when it is a Firnline pipeline's, or damaged and that is accepted."""
    try:
        value = decode_blizzard(app_id)
        int(value.get("delta_version", -1))
    except (DamagedError, TypeError, ValueError) as error:
        if accept_older:
            return None
        raise CheckpointError(
            f"the newest checkpoint of the other tool ({where}) is damaged",
            hint="Run with --accept-duplicates to go on from the one before: its last batch may be read twice.",
        ) from error
    return None if "pipeline" in value else {"delta_version": -1, **value}


def _kept_ids(storage: Storage) -> list[str]:
    """The ids that Delta's newest checkpoint keeps: those of commits whose files are cleaned up."""
    try:
        data = storage.get(f"_delta_log/{DeltaLog(storage).checkpoint_version():020d}.checkpoint.parquet")
    except FileNotFoundError:
        return []
    try:
        txns = pq.read_table(pa.BufferReader(data), columns=["txn"]).column("txn").to_pylist()
    except (pa.ArrowException, OSError, KeyError):
        return []
    return [str(txn["appId"]) for txn in txns if txn and str(txn["appId"]).startswith(BLIZZARD)]
