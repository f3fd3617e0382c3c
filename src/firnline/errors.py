"""The whole error tree: every error with its code, exit code and hint.

    FirnlineError
    |- ConfigError                 you wrote something wrong; nothing ran             (exit 2)
    |  |- SpecError                the spec file: names file, line and key path
    |  `- MissingExtraError        an optional library is not installed
    |- AccessError                 permission denied; the message names the path      (exit 1)
    |- SourceError                 input could not be read                            (exit 3)
    |  |- SourceMovedError         the checkpoint was made on another root            (exit 1)
    |  |- LateFileError            a late file with `late_files: fail`                (exit 1)
    |  |- FilesSetAsideError       the run finished, and files are set aside          (exit 7)
    |  |- GrownFileError           a file that grew, with `on_growth: fail`           (exit 1)
    |  |- SourceGapError           input that was to be read next is gone              (exit 1)
    |  |- SlotLagError             the server keeps too much log, `on_slot_lag: stop`  (exit 1)
    |  |- SourceReplacedError      the source is another one under the same name      (exit 1)
    |  |- SourceChangedError       the source changed rows that were read             (exit 1)
    |  |- SourceUndoneError        the source undid rows that were read               (exit 1)
    |  |- InputChangedError        input that was read is no longer the same          (exit 1)
    |  `- BadRecordsError          a bad record with `fail`, or too many of them      (exit 1)
    |- SchemaError                 records or a table do not match the schema         (exit 1)
    |- SinkError                   a sink could not be read or written                (exit 3)
    |  |- CommitConflictError      nothing was written; retry is safe
    |  |- CommitUnknownError       may or may not be written; ask, never guess        (exit 4)
    |  |- StagingError             the stager of a sink failed in a task
    |  |- BadRowError              a row that the sink can never hold                 (exit 1)
    |  |- OutboxFullError          too much waits for a sink, with `on_full: stop`    (exit 1)
    |  |- NotDurableError          an fsync failed: what was written may be lost      (exit 1)
    |  |- StoreUnsafeError         the storage has no put-if-absent                   (exit 1)
    |  |- TableLostError           a table that existed is missing                    (exit 1)
    |  `- TornCommitError          a commit file of the table is truncated            (exit 1)
    |- FencedError                 a newer generation owns this pipeline              (exit 5)
    |- AlreadyRunningError         another run holds the lease and is alive           (exit 6)
    |- EngineError                 Spark could not do the work                        (exit 3)
    |  `- WorkerLostError          a worker died, hung or timed out
    |- OperatorError               an operator's own code failed                      (exit 1)
    |- ControlError                a run did not carry out a command                  (exit 1)
    |  `- NotRunningError          no run of the pipeline is reachable here
    `- CheckpointError             a stored value cannot be trusted or used           (exit 1)
       |- DamagedError             a stored value does not match its checksum or shape
       |  `- OutboxDamagedError    a file of the outbox is missing or damaged: its rows are made again
       |- OutboxLostError          rows that wait for a sink are gone, and cannot be made again
       |- CheckpointLostError      no intact copy of the newest checkpoint exists
       |- LedgerHoleError          an entry of the ledger chain is missing or damaged
       |- StateDamagedError        a file of keyed state is missing or damaged
       |- NewerFormatError         written by a newer Firnline
       |- VersionConflictError     another process wrote a newer version to the store
       |- StoreReadOnlyError       the store is a view or a copy, and cannot be changed
       |- StoreAheadError          the store or a tier is ahead of the sink
       |- SinkDivergedError        a sink holds an epoch that was never decided
       |- SinkWentBackError        a sink lost epochs that the outbox no longer has
       |- DecidingSinkError        another table than before would decide
       |- StateIncompleteError     a state checkpoint was never completed, or was aborted
       |- StateConflictError       another process began or decided the same state checkpoint
       |- StateLostError           no tier has an operator's state, and a replay cannot rebuild it
       |- RollbackRefusedError     the rollback is not possible; the message gives the reason
       `- PlanChangedError         what was planned is no longer what would be done

Every error has a stable `code`, whether a retry is safe, and a hint at the next step. Errors survive
pickling, because Spark workers raise them too.
"""

from __future__ import annotations

import errno
import os
import pwd
import re
from collections.abc import Iterator
from typing import Any, ClassVar

__all__ = [
    "AccessError",
    "AlreadyRunningError",
    "BadRecordsError",
    "BadRowError",
    "CheckpointError",
    "CheckpointLostError",
    "CommitConflictError",
    "CommitUnknownError",
    "ConfigError",
    "ControlError",
    "DamagedError",
    "DecidingSinkError",
    "EngineError",
    "FencedError",
    "FilesSetAsideError",
    "FirnlineError",
    "GrownFileError",
    "InputChangedError",
    "LateFileError",
    "LedgerHoleError",
    "MissingExtraError",
    "NewerFormatError",
    "NotDurableError",
    "NotRunningError",
    "OperatorError",
    "OutboxDamagedError",
    "OutboxFullError",
    "OutboxLostError",
    "PlanChangedError",
    "RollbackRefusedError",
    "SchemaError",
    "SinkDivergedError",
    "SinkError",
    "SinkWentBackError",
    "SlotLagError",
    "SourceChangedError",
    "SourceError",
    "SourceGapError",
    "SourceMovedError",
    "SourceReplacedError",
    "SourceUndoneError",
    "SpecError",
    "StagingError",
    "StateConflictError",
    "StateDamagedError",
    "StateIncompleteError",
    "StateLostError",
    "StoreAheadError",
    "StoreReadOnlyError",
    "StoreUnsafeError",
    "TableLostError",
    "TornCommitError",
    "VersionConflictError",
    "WorkerLostError",
]


class FirnlineError(Exception):
    """Root of all errors that Firnline raises on purpose.

    Args:
        message: What happened, for a person, in one sentence.
        hint: What to do next; the class default is used when it is omitted.
        fields: Facts about the failure, for logs and `--json`.
    """

    code: ClassVar[str] = "error"
    retryable: ClassVar[bool] = False
    exit_code: ClassVar[int] = 1
    default_hint: ClassVar[str] = "Run again with --debug for the full traceback."

    def __init__(self, message: str, *, hint: str | None = None, **fields: object) -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint or self.default_hint
        self.fields = fields

    def __reduce__(self) -> tuple[object, ...]:
        return (_rebuild, (type(self), self.message, self.hint, self.fields))


def _rebuild(cls: type[FirnlineError], message: str, hint: str, fields: dict[str, object]) -> FirnlineError:
    return cls(message, hint=hint, **fields)


def error_report(error: FirnlineError) -> dict[str, Any]:
    """Return an error of a task in plain JSON, for `rebuild_error`."""
    fields = {name: value for name, value in error.fields.items() if isinstance(value, str | int | float | None)}
    return {"code": error.code, "message": error.message, "hint": error.hint, "fields": fields}


def rebuild_error(value: dict[str, Any]) -> FirnlineError:
    """Return the error that a task reported, as the class with its code."""
    by_code: dict[str, type[FirnlineError]] = {}
    for cls in _all_errors(FirnlineError):
        by_code.setdefault(cls.code, cls)  # a class without a code of its own has other arguments
    return by_code.get(value["code"], EngineError)(value["message"], hint=value["hint"], **value["fields"])


def _all_errors(root: type[FirnlineError]) -> Iterator[type[FirnlineError]]:
    yield root
    for child in root.__subclasses__():
        yield from _all_errors(child)


class ConfigError(FirnlineError):
    """A setting is wrong; nothing ran."""

    code = "config"
    exit_code = 2
    default_hint = "Correct the setting and run again; `firnline dry-run` checks without writing."


class SpecError(ConfigError):
    """The spec file is wrong; the message names file, line and key path."""

    code = "spec"


class MissingExtraError(ConfigError):
    """An optional library is not installed."""

    code = "missing-extra"

    def __init__(self, message: str = "", *, hint: str | None = None, extra: str = "", **fields: object) -> None:
        super().__init__(
            message or f"this needs the optional part {extra!r}, which is not installed",
            hint=hint or f"pip install 'firnline[{extra}]'",
            extra=extra,
            **fields,
        )


def no_such_folder(path: str, hint: str) -> ConfigError:
    """Return the error for a folder that does not exist: one wording and one exit code for all commands."""
    return ConfigError(f"{path}: no such folder", hint=hint, path=path)


class AccessError(FirnlineError):
    """This user may not read or write a file or folder; a retry would not help."""

    code = "access"
    default_hint = "Give the user that runs Firnline access to it, or run as another user; nothing was lost."

    def __init__(self, message: str = "", *, hint: str | None = None, path: str = "", **fields: object) -> None:
        super().__init__(message or f"{path}: permission denied for user {_user()}", hint=hint, path=path, **fields)


def find_denied(error: BaseException | None) -> AccessError | None:
    """Return the error for a path to which access is denied, if that is the cause of a failure.

    Libraries and workers report it only in the text of their errors.
    """
    seen: set[int] = set()
    while error is not None and id(error) not in seen:
        seen.add(id(error))
        if isinstance(error, AccessError):
            return error
        if isinstance(error, PermissionError) and error.filename:
            return AccessError(path=_outermost(os.fsdecode(error.filename)))
        for pattern in _DENIED:
            found = pattern.search(str(error))
            if found is not None:
                return AccessError(path=_outermost(found.group(1)))
        error = error.__cause__ or error.__context__
    return None


def hint_at_full_disk(error: FirnlineError) -> None:
    """Give an error whose cause is a full disk the hint to free space."""
    seen: set[int] = set()
    cause: BaseException | None = error
    while cause is not None and id(cause) not in seen:
        seen.add(id(cause))
        full = isinstance(cause, OSError) and cause.errno in (errno.ENOSPC, errno.EDQUOT)
        if full or any(text in str(cause) for text in _FULL):
            path = getattr(cause, "filename", None)
            where = f" for {os.fsdecode(path)}" if path else ""
            error.hint = f"The disk is full: free some space{where}, then run again. What is committed is safe."
            return
        cause = cause.__cause__ or cause.__context__


_FULL = ("[Errno 28]", "No space left on device", "Disk quota exceeded")
_DENIED = (
    re.compile(r"\[Errno 13\] Permission denied: '([^']+)'"),
    re.compile(r"((?:/[^/\s:]+)+)[^/]{0,80}Permission denied \(os error 13\)"),
)


def _outermost(path: str) -> str:
    """Return the outermost folder on the way to a path that this user may not enter; else the path."""
    parts = path.split("/")
    folders = ("/".join(parts[:end]) for end in range(2, len(parts)))
    return next((folder for folder in folders if os.path.isdir(folder) and not os.access(folder, os.X_OK)), path)


def _user() -> str:
    try:
        return pwd.getpwuid(os.geteuid()).pw_name
    except KeyError:
        return str(os.geteuid())


class SourceError(FirnlineError):
    """Input could not be listed or read."""

    code = "source"
    retryable = True
    exit_code = 3
    default_hint = "Check that the source path exists and can be read, then run again; nothing was lost."


class SourceMovedError(SourceError):
    """The checkpoint was made on another source root."""

    code = "source-moved"
    retryable = False
    exit_code = 1
    default_hint = "If the same files moved, run once with --source-moved OLD=NEW."


class LateFileError(SourceError):
    """A late file appeared (its name sorts before files already read), and `late_files` is `fail`."""

    code = "late-file"
    retryable = False
    exit_code = 1
    default_hint = "See `firnline files --status late`; set late_files: ingest or ignore to continue."


class FilesSetAsideError(SourceError):
    """The run finished, and files that could not be read are set aside; raised only with `--fail-on-set-aside`."""

    code = "files-set-aside"
    retryable = False
    exit_code = 7
    default_hint = "`firnline files --status set_aside` shows them; --retry reads one again, --drop gives it up."


class GrownFileError(SourceError):
    """A file grew after it was read, and `on_growth` is `fail`."""

    code = "grown-file"
    retryable = False
    exit_code = 1
    default_hint = (
        "See `firnline files --status grown`. Set on_growth: read_rest to read what was appended (plain NDJSON), or "
        "on_growth: report to go on without it."
    )


class SourceGapError(SourceError):
    """Input after the position is gone: retention has passed it, or a file of it is lost."""

    code = "source-gap"
    retryable = False
    exit_code = 1
    default_hint = (
        "Restore what is missing, or read the rest into a pipeline of another name, with `start` behind the gap. Of a "
        "captured database: read all tables again with `firnline run --resnapshot-all`, or lose what changed in "
        "between: `firnline run --accept-gap`."
    )


class SlotLagError(SourceError):
    """A server keeps more of its log for the source than `max_slot_lag_bytes`, and `on_slot_lag` is `stop`."""

    code = "slot-lag"
    retryable = False
    exit_code = 1
    default_hint = (
        "Find in `firnline status` what holds the pipeline up. To catch up, set on_slot_lag: warn or a larger "
        "max_slot_lag_bytes, then run again."
    )


class SourceReplacedError(SourceError):
    """Under the name of the source is another one than the checkpoint was made on."""

    code = "source-replaced"
    retryable = False
    exit_code = 1
    default_hint = "Put the old one back, or read the new one into a pipeline of another name."


class SourceChangedError(SourceError):
    """The source changed or deleted rows, and `on_change` is `fail`."""

    code = "source-changed"
    retryable = False
    exit_code = 1
    default_hint = (
        "Set on_change: ignore to go on without the change, or on_change: change_feed to read changes as rows."
    )


class SourceUndoneError(SourceError):
    """The source took back rows that this pipeline has read."""

    code = "source-undone"
    retryable = False
    exit_code = 1
    default_hint = "Take this pipeline back as well: `firnline rollback --to EPOCH`, to an epoch before those rows."


class InputChangedError(SourceError):
    """Input that an epoch read has changed, so that the epoch cannot be read again: compaction, lost records."""

    code = "input-changed"
    retryable = False
    exit_code = 1
    default_hint = "Restore the operator's state from a savepoint or another tier: `firnline checkpoints` shows them."


class BadRecordsError(SourceError):
    """A bad record with `on_bad_record: fail`, or more of them than `max_bad_ratio` allows."""

    code = "bad-records"
    retryable = False
    exit_code = 1
    default_hint = "Look at the named file and line; raise max_bad_ratio or set on_bad_record: quarantine to continue."


class SchemaError(FirnlineError):
    """Records or an existing table do not match the schema."""

    code = "schema"
    default_hint = "See `firnline dry-run`; set schema.evolution to add or rescue, or change the declared fields."


class SinkError(FirnlineError):
    """A sink could not be read or written."""

    code = "sink"
    retryable = True
    exit_code = 3
    default_hint = "Check that the table can be reached and written, then run again; nothing was lost."


class CommitConflictError(SinkError):
    """Another writer committed at the same time; nothing was written."""

    code = "commit-conflict"


class CommitUnknownError(SinkError):
    """The answer to a commit was lost; the commit may or may not have happened."""

    code = "commit-unknown"
    exit_code = 4
    default_hint = "Run again: the next run reads the table and finds out; nothing is written twice."


class StagingError(SinkError):
    """The stager of a sink failed in a task. For an optional sink the epoch is repeated without it."""

    code = "staging"


class BadRowError(SinkError):
    """A row that the sink can never hold, with `on_bad_row: stop`."""

    code = "bad-row"
    retryable = False
    exit_code = 1
    default_hint = "Correct the target, or set `on_bad_row: dead_letter` on the sink."


class OutboxFullError(SinkError):
    """More waits in the outbox for a sink than may, and the spec says that this stops the run."""

    code = "outbox-full"
    retryable = False
    exit_code = 1
    default_hint = "Repair the sink, allow more (outbox.max_bytes), or set `outbox.on_full: set_aside`."


class NotDurableError(SinkError):
    """An fsync failed, or the disk does not hold what was written; the run must not build on it."""

    code = "not-durable"
    retryable = False
    exit_code = 1
    default_hint = (
        "Check the disk (dmesg, smartctl, free space), then run again: the next run reads the table from the disk."
    )


class StoreUnsafeError(SinkError):
    """The storage has no put-if-absent, so commits could overwrite each other."""

    code = "store-unsafe"
    retryable = False
    exit_code = 1
    default_hint = "Use a store with conditional put (local disk, S3, GCS, Azure)."


class TableLostError(SinkError):
    """A table or its log is missing, although this pipeline has claimed it."""

    code = "table-lost"
    retryable = False
    exit_code = 1
    default_hint = "Restore the table's folder, _delta_log included, from a backup; to start over, name another table."


class TornCommitError(SinkError):
    """A commit file of a table is truncated."""

    code = "torn-commit"
    retryable = False
    exit_code = 1
    default_hint = "Stop every writer of the table, remove the named file from its log, and run again."


class FencedError(FirnlineError):
    """A newer generation owns this pipeline; this run must not write anymore."""

    code = "fenced"
    exit_code = 5
    default_hint = "Another run of this pipeline took over; see `firnline status`."


class AlreadyRunningError(FirnlineError):
    """Another run of this pipeline holds the lease and is alive; nothing was changed."""

    code = "already-running"
    exit_code = 6
    default_hint = (
        "Stop it with `firnline stop`, wait for it with `firnline run --standby`, or repeat the command with "
        "--take-over, which ends that run."
    )


class EngineError(FirnlineError):
    """Spark could not start or a job failed."""

    code = "engine"
    retryable = True
    exit_code = 3
    default_hint = "Run again; the epoch is repeated from the last checkpoint. --debug shows Spark's own message."


class WorkerLostError(EngineError):
    """A task did not finish: its worker died, hung, or timed out."""

    code = "worker-lost"
    default_hint = "The run retries the epoch; raise checkpoint.timeout_ms if its shards need more time."


class OperatorError(FirnlineError):
    """The code of an operator raised an exception; the same rows would raise it again."""

    code = "operator"
    default_hint = "Correct the operator's code, or filter the row out in a query before it; nothing was committed."


class ControlError(FirnlineError):
    """A command did not reach a run, or the run did not carry it out in time."""

    code = "control"
    default_hint = "See `firnline status`; the run itself continues."


class NotRunningError(ControlError):
    """No run of the pipeline is reachable on this machine."""

    code = "not-running"
    default_hint = "`firnline status` shows the last run; `firnline run` starts a new one."


class CheckpointError(FirnlineError):
    """A stored value cannot be trusted or used."""

    code = "checkpoint"
    default_hint = "See `firnline checkpoints`."


class DamagedError(CheckpointError):
    """A stored value does not match its checksum or its shape."""

    code = "damaged"
    default_hint = "Firnline uses another copy if there is one; see `firnline checkpoints`."


class OutboxDamagedError(DamagedError):
    """A file of the outbox is missing, or differs from what was written. A run makes its rows again from the input."""

    code = "outbox-damaged"
    default_hint = (
        "Run the pipeline: it reads the slice of that epoch again. Or copy the sink: firnline sinks resync SINK"
    )


class OutboxLostError(CheckpointError):
    """Rows that wait for a sink are damaged or gone, and cannot be made again from the input."""

    code = "outbox-lost"
    default_hint = "Copy the sink anew: firnline sinks resync SINK --from TABLE --yes"


class CheckpointLostError(CheckpointError):
    """No intact copy of the newest checkpoint exists."""

    code = "checkpoint-lost"
    default_hint = "Restore the table's _delta_log or _firnline folder from a backup; Firnline does not guess."


class LedgerHoleError(CheckpointError):
    """An entry of the ledger chain is missing or damaged."""

    code = "ledger-hole"
    default_hint = "Firnline cannot tell late files from processed ones. For the repair run: firnline ledger repair"


class StateDamagedError(CheckpointError):
    """A file of keyed state is missing, or does not match its checksum, and no other copy is intact."""

    code = "state-damaged"
    default_hint = "Restore the file from a backup or the remote tier, or roll back: see `firnline checkpoints`."


class NewerFormatError(CheckpointError):
    """A newer Firnline than this one wrote the value."""

    code = "newer-format"
    default_hint = "Upgrade Firnline on this machine: pip install -U firnline."


class VersionConflictError(CheckpointError):
    """Another process wrote a newer version to the store."""

    code = "version-conflict"
    default_hint = "Another process wrote to the store at the same time; repeat the command."


class StoreReadOnlyError(CheckpointError):
    """The store is a view or a copy, and cannot be changed itself."""

    code = "store-read-only"
    default_hint = "Use `firnline rollback`, which rolls table and checkpoint back together."


class StoreAheadError(CheckpointError):
    """A store or a tier is ahead of the sink, which is the truth."""

    code = "store-ahead"
    default_hint = "The table was replaced or restored: put the right table back, or delete the store's copy."


class SinkDivergedError(CheckpointError):
    """A sink after the deciding one holds an epoch that was never decided."""

    code = "sink-diverged"
    default_hint = "Restore the sink from a savepoint, or remove it from the spec: the other sinks continue."


class SinkWentBackError(CheckpointError):
    """A sink lost epochs that it held. A run joins it again; it fails if the outbox no longer has them all."""

    code = "sink-went-back"
    default_hint = "Copy the sink anew: firnline sinks resync SINK --yes"


class DecidingSinkError(CheckpointError):
    """Another table than before would decide the epochs."""

    code = "deciding-sink"
    default_hint = "List the table that decided so far first among the sinks, and keep it required."


class StateIncompleteError(CheckpointError):
    """A state checkpoint was never completed, was aborted, or lacks metadata."""

    code = "state-incomplete"
    default_hint = "See `firnline checkpoints`; Firnline uses another tier or an older checkpoint if there is one."


class StateLostError(CheckpointError):
    """No tier has an operator's state, and a replay of the epochs since an older snapshot is not possible."""

    code = "state-lost"
    default_hint = (
        "Restore the state's folder, the remote tier or the input files; or restore a savepoint; "
        "or start fresh: firnline run --fresh-after EPOCH --truncate"
    )


class StateConflictError(CheckpointError):
    """Another process began or decided the same state checkpoint differently; its result stays."""

    code = "state-conflict"
    default_hint = "Run again: the epoch is repeated under a new attempt, with files of its own."


class RollbackRefusedError(CheckpointError):
    """The rollback, restore or fresh start is not possible; nothing was changed."""

    code = "rollback-refused"
    default_hint = "`firnline checkpoints` lists the epochs to which a rollback is possible."


class PlanChangedError(CheckpointError):
    """What was planned and agreed to is no longer what would be done; nothing was changed but the generation."""

    code = "plan-changed"
    default_hint = "Look at a new plan, then confirm that one."
