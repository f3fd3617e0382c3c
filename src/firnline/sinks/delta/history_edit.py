"""Applies a history edit to a table: restores a version, replaces or empties its rows, or keeps them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import pyarrow as pa
from deltalake import DeltaTable
from deltalake.exceptions import DeltaError

from firnline.errors import DamagedError, NewerFormatError, RollbackRefusedError
from firnline.names import BLIZZARD, is_service_txn, txn_owner
from firnline.sinks.base import Effect, KeepRows, ReplaceRows, RestoreVersion, Stranger
from firnline.sinks.delta.log import DeltaLog, LogCommit, decode_blizzard
from firnline.sinks.delta.table import Table
from firnline.types import Json


def apply_effect(
    table: Table, effect: Effect, info: Json, txns: Mapping[str, int], expiring: Mapping[str, int], *, onto: int
) -> int:
    """Commit an effect with its transaction ids onto the version `onto`. Returns the new version."""
    match effect:
        case KeepRows():
            return table.append("delta.jump", [], info, txns, expiring, onto=onto)
        case RestoreVersion(version):
            return table.restore("delta.jump", version, info, txns, expiring, onto=onto)
        case ReplaceRows(files):
            return table.append("delta.jump", files, info, txns, expiring, onto=onto, replace=True)


@dataclass(frozen=True, slots=True)
class EpochVersions:
    """Maps epochs to table versions; epochs that were committed together share a version."""

    versions: dict[int, int]  # epoch -> version, for epochs that end a commit
    inside: dict[int, int]  # epoch -> the newest epoch of the commit that it shares

    def find(self, epoch: int) -> int | None:
        return self.versions.get(epoch)

    def nearest(self, epoch: int) -> list[int]:
        """Return the nearest epochs below and above that have their own version."""
        below = max((e for e in self.versions if e < epoch), default=None)
        above = min((e for e in self.versions if e > epoch), default=None)
        return [e for e in (below, above) if e is not None]


def read_epoch_versions(log: DeltaLog, pipeline: str, version: int, down_to: int) -> EpochVersions:
    """Walk the log back from `version` to the commit that ends at epoch `down_to` or below."""
    versions: dict[int, int] = {}
    inside: dict[int, int] = {}
    for commit in log.backwards(version):
        info = commit.find_info(pipeline)
        if info is None or "checkpoint" not in info:
            continue
        last = int(info["epoch"])
        versions.setdefault(last, commit.version)
        units = [int(u["epoch"]) for u in info.get("units") or []]
        inside.update({epoch: last for epoch in units if epoch != last})
        if last <= down_to:
            break
    return EpochVersions(versions, inside)


@dataclass(frozen=True, slots=True)
class TableFiles:
    """The files of one version of a table, by path, with their rows."""

    rows: dict[str, int]
    schema: pa.Schema
    properties: dict[str, str]


def read_files(table: Table, version: int | None = None) -> TableFiles:
    """Return the files at the version of the handle, or of an earlier one. Reads the log, no data file.

    Raises:
        RollbackRefusedError: the log no longer reaches back to that version.
    """
    delta = table.delta
    if version is not None and version != table.version:
        try:
            delta = DeltaTable(table.uri, version=version, storage_options=table.storage_options)
        except (DeltaError, OSError) as error:
            raise RollbackRefusedError(
                f"the log of {table.uri} no longer reaches back to version {version}: {error}", version=version
            ) from error
    actions = pa.table(delta.get_add_actions(flatten=True))
    rows = actions.column("num_records").to_pylist() if "num_records" in actions.column_names else []
    paths = actions.column("path").to_pylist()
    return TableFiles(
        rows={str(path): int(n or 0) for path, n in zip(paths, rows or [0] * len(paths), strict=True)},
        schema=pa.schema(delta.schema().to_arrow()),
        properties={k: str(v) for k, v in delta.metadata().configuration.items()},
    )


def find_strangers(log: DeltaLog, pipeline: str, after: int, up_to: int) -> list[Stranger]:
    """Return others that changed rows in the versions `after < version <= up_to`: pipelines, applications or
    operations.

    Raises:
        RollbackRefusedError: a commit in between is no longer in the log.
    """
    found: dict[str, Stranger] = {}
    for version in range(after + 1, up_to + 1):
        commit = log.read(version)
        if commit is None:
            raise RollbackRefusedError(f"version {version} is no longer in the log", version=version)
        for name in _strangers_of(commit, pipeline):
            found.setdefault(name, Stranger(name)).versions.append(version)
    return list(found.values())


def _strangers_of(commit: LogCommit, pipeline: str) -> list[str]:
    """Return the authors of a commit that changes rows; none for our own and for commits without row changes."""
    if not changes_rows(commit) or commit.find_info(pipeline) is not None:
        return []
    return find_owners((str(t["appId"]) for t in commit.txns()), pipeline) or [operation_of(commit)]


def changes_rows(commit: LogCommit) -> bool:
    """Return whether a commit changes rows, not only their storage."""
    return any(a.get(kind, {}).get("dataChange", False) for a in commit.actions for kind in ("add", "remove"))


def operation_of(commit: LogCommit) -> str:
    """Return the name of a commit's operation."""
    info: dict[str, Json] = next((a["commitInfo"] for a in commit.actions if "commitInfo" in a), {})
    return str(info.get("operation", "unknown"))


def find_owners(app_ids: Iterable[str], pipeline: str) -> list[str]:
    """Return the other pipelines and programs that own transaction ids, except this pipeline itself."""
    found: dict[str, None] = {}
    for app_id in app_ids:
        if is_service_txn(app_id):
            continue
        owner = txn_owner(app_id)
        name = owner if owner is not None else _interchange_owner(app_id) if app_id.startswith(BLIZZARD) else app_id
        if name != pipeline or (owner is None and name == app_id):
            found[name] = None
    return list(found)


def _interchange_owner(app_id: str) -> str:
    """Return the owner of an interchange id: a pipeline, the other tool, or another user of that name."""
    try:
        state = decode_blizzard(app_id)
    except (DamagedError, NewerFormatError):
        return app_id
    return str(state.get("pipeline", BLIZZARD.rstrip(":")))
