"""Plans a rollback or a restore for one Delta table: versions, files and rows, and the obstacles."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import dataclass
from urllib.parse import unquote

from firnline.errors import DamagedError, RollbackRefusedError
from firnline.names import epoch_txn
from firnline.sinks.base import Effect, KeepRows, LoggedCommit, ReplaceRows, RestoreVersion, SinkReturn, Stranger
from firnline.sinks.delta.history_edit import TableFiles, find_strangers, read_epoch_versions, read_files
from firnline.sinks.delta.log import DeltaLog, LogCommit
from firnline.sinks.delta.sweeps import SweepLog
from firnline.sinks.delta.table import Table
from firnline.sinks.outbox import find_missing
from firnline.storage import Storage

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
        table = self.table
        try:
            version = self.version_of(to_epoch)
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
