"""History edits of one Delta table: plans a rollback or restore with all obstacles, and applies an edit's effect."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from urllib.parse import unquote

import pyarrow as pa
from deltalake import DeltaTable
from deltalake.exceptions import DeltaError

from firnline.errors import DamagedError, NewerFormatError, RollbackRefusedError
from firnline.names import BLIZZARD, epoch_txn, is_service_txn, txn_owner
from firnline.sinks.base import (
    Effect,
    KeepRows,
    LoggedCommit,
    ReplaceRows,
    RestoreVersion,
    SinkReturn,
    Stranger,
    find_birth,
)
from firnline.sinks.delta.log import DeltaLog, LogCommit, decode_blizzard
from firnline.sinks.delta.sweeps import SweepLog
from firnline.sinks.delta.table import Table
from firnline.sinks.outbox import find_missing
from firnline.storage import Storage
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
    birth: tuple[int, int] | None = None  # of a table that was added later: the epoch it begins after, and the version

    def find(self, epoch: int) -> int | None:
        if self.birth is not None and epoch <= self.birth[0]:  # it has no rows of epochs before
            return self.birth[1]
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
        born = find_birth(info)
        if born:
            return EpochVersions(versions, inside, (born, commit.version))
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


NAMED = 3  # examples in a message


@dataclass(frozen=True, slots=True)
class TableHistory:
    """The versions of a pipeline's table. Each method reads the version of the handle; none moves it."""

    sink: str
    pipeline: str
    table: Table
    log: DeltaLog
    storage: Storage

    def version_of(self, epoch: int) -> int:
        """Return the table version whose newest epoch is `epoch`.

        Raises:
            RollbackRefusedError: there is none: shared with later epochs, or cleaned out of the log.
        """
        found = read_epoch_versions(self.log, self.pipeline, self.table.version, epoch)
        version = found.find(epoch)
        if version is not None:
            return version
        if epoch in found.inside:
            near = " or ".join(str(e) for e in found.nearest(epoch))
            raise RollbackRefusedError(
                f"{self.sink}: epoch {epoch} was committed together with later ones, up to {found.inside[epoch]}",
                hint=f"Nearest possible: --to {near}",
                epoch=epoch,
                nearest=found.nearest(epoch),
            )
        raise RollbackRefusedError(
            f"{self.sink}: the commit of epoch {epoch} is no longer in the table's log",
            hint="The log's retention (delta.logRetentionDuration) has passed; use a savepoint where there is one.",
            epoch=epoch,
        )

    def plan_return(
        self, holds: int, to_epoch: int, accept: Collection[str]
    ) -> tuple[SinkReturn, list[RollbackRefusedError]]:
        """Plan the return from epoch `holds`. Reads the log and looks files up, opens no data file."""
        try:
            return self.plan_version(holds, self.version_of(to_epoch), accept)
        except RollbackRefusedError as error:
            return SinkReturn(self.sink, self.table.uri, holds, self.table.version), [error]

    def plan_version(
        self, holds: int, version: int, accept: Collection[str]
    ) -> tuple[SinkReturn, list[RollbackRefusedError]]:
        """Plan the return from epoch `holds` to a version of the table."""
        table = self.table
        try:
            now, then = read_files(table), read_files(table, version)
            strangers = self.find_strangers(version)
        except RollbackRefusedError as error:
            return SinkReturn(self.sink, table.uri, holds, table.version), [error]
        removed, restored = now.rows.keys() - then.rows.keys(), then.rows.keys() - now.rows.keys()
        plan = SinkReturn(
            name=self.sink,
            table=table.uri,
            epoch=holds,
            version_now=table.version,
            version_then=version,
            files_removed=len(removed),
            rows_removed=sum(now.rows[path] for path in removed),
            files_restored=len(restored),
            rows_restored=sum(then.rows[path] for path in restored),
            columns_removed=[name for name in now.schema.names if name not in then.schema.names],
            properties_changed=_changed(now, then),
            others=[f"{s.name} (version {', '.join(map(str, s.versions[:NAMED]))})" for s in strangers],
            foreign_commits=sum(len(s.versions) for s in strangers),
            restored=tuple(sorted(restored)),
        )
        problems = []
        if now.properties.get("delta.appendOnly", "false").lower() == "true":
            problems.append(
                RollbackRefusedError(
                    f"{self.sink}: the table is append-only, and rows would be removed",
                    hint="Set its property delta.appendOnly to false, if that may be.",
                )
            )
        doomed = self._find_doomed(restored, f"of version {version}")
        missing = find_missing(self.storage, restored)  # after the check of sweeps: their files are gone by now
        if doomed is not None:
            problems.append(doomed)
        elif missing:
            problems.append(
                RollbackRefusedError(
                    f"{self.sink}: {len(missing)} file(s) of version {version} are vacuumed: "
                    f"{', '.join(missing[:NAMED])}",
                    hint="Go back less far, or restore a savepoint: `firnline savepoint list`.",
                )
            )
        unaccepted = [s for s in strangers if s.name not in accept]
        if unaccepted:
            names = ", ".join(f"{s.name} (version {', '.join(map(str, s.versions[:NAMED]))})" for s in unaccepted)
            flags = " ".join(f"--accept {s.name}" for s in unaccepted)
            problems.append(
                RollbackRefusedError(
                    f"{self.sink}: others changed rows since, and their changes would be lost: {names}",
                    hint=f"If they may be lost: {flags}",
                )
            )
        return plan, problems

    def find_strangers(self, since: int) -> list[Stranger]:
        """Return others that changed rows after a version.

        Raises:
            RollbackRefusedError: a commit in between is no longer in the log.
        """
        return find_strangers(self.log, self.pipeline, since, self.table.version)

    def find_missing(self, effect: Effect, *, exists: bool) -> list[str]:
        """Return missing files that an effect brings into the table, or why that is unknown."""
        match effect:
            case KeepRows():
                return []
            case ReplaceRows(files):
                wanted = {str(file["path"]) for file in files}
            case RestoreVersion(version):
                if not exists:
                    return [f"version {version} of {self.table.uri}"]
                try:
                    wanted = read_files(self.table, version).rows.keys() - read_files(self.table).rows.keys()
                except RollbackRefusedError as error:
                    return [error.message]
        doomed = self._find_doomed(wanted, "that come back") if exists else None
        return [doomed.message] if doomed is not None else find_missing(self.storage, wanted)

    def _find_doomed(self, paths: Collection[str], which: str) -> RollbackRefusedError | None:
        """Return why files cannot be named again: a sweep has declared their deletion."""
        names = {key for path in paths for key in (path, unquote(path))}
        found = SweepLog(self.storage, self.table).find_covering(names)
        if found is None:
            return None
        intent, doomed = found
        shown = ", ".join(sorted(doomed)[:NAMED])
        finish = f"A sweep that died is finished by: firnline gc {self.table.uri} --yes"
        return RollbackRefusedError(
            f"{self.sink}: {len(doomed)} file(s) {which} are being deleted by {intent}: {shown}",
            hint=f"Go back less far, or restore a savepoint. {finish}",
            sweep=intent.name,
        )


def read_commits(log: DeltaLog, pipeline: str, version: int, limit: int | None) -> Iterator[LoggedCommit]:
    """Yield the commits of a pipeline, newest first, from a version down."""
    for commit in log.backwards(version, limit):
        txn = next((t for t in commit.txns() if t["appId"] == epoch_txn(pipeline)), None)
        info, problem = _info_of(commit, pipeline)
        if txn is not None or info is not None:
            yield LoggedCommit(
                commit.version, commit.time(), int(txn["version"]) if txn is not None else None, info or {}, problem
            )


def _info_of(commit: LogCommit, pipeline: str) -> tuple[dict[str, object] | None, str]:
    try:
        return commit.info(pipeline), ""
    except DamagedError as error:
        return None, error.message


def _changed(now: TableFiles, then: TableFiles) -> list[str]:
    keys = sorted(now.properties.keys() | then.properties.keys())
    return [key for key in keys if now.properties.get(key) != then.properties.get(key)]
