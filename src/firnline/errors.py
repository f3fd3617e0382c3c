"""The whole error tree: every error with its code, exit code and hint.

    FirnlineError
    |- ConfigError                 you wrote something wrong; nothing ran             (exit 2)
    |  |- SpecError                the spec file: names file, line and key path
    |  `- MissingExtraError        an optional library is not installed
    |- SourceError                 input could not be read                            (exit 3)
    |  |- SourceMovedError         the checkpoint was made on another root            (exit 1)
    |  |- LateFileError            a late file under `late_files: fail`               (exit 1)
    |  `- BadRecordsError          a bad record under `fail`, or too many of them     (exit 1)
    |- SchemaError                 data or table does not fit the schema              (exit 1)
    |- SinkError                   a sink could not be read or written                (exit 3)
    |  |- CommitConflictError      nothing was written; retry is safe
    |  |- CommitUnknownError       may or may not be written; ask, never guess        (exit 4)
    |  |- NotDurableError          an fsync failed: what was written may be lost      (exit 1)
    |  |- StoreUnsafeError         the storage has no put-if-absent                   (exit 1)
    |  |- TableLostError           a table that was there is gone                     (exit 1)
    |  `- TornCommitError          a commit file of the table was cut off             (exit 1)
    |- FencedError                 a newer generation owns this pipeline              (exit 5)
    |- EngineError                 Spark could not do the work                        (exit 3)
    |  `- WorkerLostError          a worker died, hung or did not end in time
    |- OperatorError               an operator's own code failed                      (exit 1)
    |- ControlError                a running pipeline could not be told something     (exit 1)
    |  `- NotRunningError          no run of the pipeline is reachable here
    `- CheckpointError             what is stored cannot be trusted                   (exit 1)
       |- DamagedError             a stored value does not match its checksum or shape
       |- CheckpointLostError      no intact copy tells the newest epoch
       |- LedgerHoleError          an entry of the ledger chain is missing or damaged
       |- StateDamagedError        a file of keyed state is missing or not what was written
       |- NewerFormatError         written by a newer Firnline
       |- VersionConflictError     somebody else put a newer version into the store
       |- StoreReadOnlyError       the store is a view or a copy; what it shows lives elsewhere
       |- StoreAheadError          the store or a tier knows more than the sink
       |- SinkDivergedError        a sink holds an epoch that was never decided
       |- DecidingSinkError        another table than before would decide
       |- StateIncompleteError     a checkpoint of state was never completed, or was aborted
       |- StateConflictError       a checkpoint of state was begun or decided otherwise
       |- StateLostError           no tier has an operator's state, and it cannot be made again
       `- RollbackRefusedError     one cannot go back there; the message says why

Every error has a stable `code`, says whether a retry is safe, and hints at the next step. Errors
survive pickling, because Spark workers raise them too.
"""

from __future__ import annotations

from typing import ClassVar


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
    """A file appeared below the high-water mark and the policy is `fail`."""

    code = "late-file"
    retryable = False
    exit_code = 1
    default_hint = "See `firnline files --status late`; set late_files: ingest or ignore to go on."


class BadRecordsError(SourceError):
    """Bad records under `on_bad_record: fail`, or more of them than `max_bad_ratio` allows."""

    code = "bad-records"
    retryable = False
    exit_code = 1
    default_hint = "Look at the named file and line; raise max_bad_ratio or set on_bad_record: quarantine to go on."


class SchemaError(FirnlineError):
    """Records or an existing table do not fit the schema."""

    code = "schema"
    default_hint = "See `firnline dry-run`; set schema.evolution to add or rescue, or change the declared fields."


class SinkError(FirnlineError):
    """A sink could not be read or written."""

    code = "sink"
    retryable = True
    exit_code = 3
    default_hint = "Check that the table can be reached and written, then run again; nothing was lost."


class CommitConflictError(SinkError):
    """The table moved under a commit; nothing was written."""

    code = "commit-conflict"


class CommitUnknownError(SinkError):
    """The answer to a commit was lost; it may or may not stand."""

    code = "commit-unknown"
    exit_code = 4
    default_hint = "Run again: the next run reads the table and finds out; nothing is written twice."


class NotDurableError(SinkError):
    """An fsync failed, or the disk holds something else than was written: nothing may build on it."""

    code = "not-durable"
    retryable = False
    exit_code = 1
    default_hint = (
        "Check the disk (dmesg, smartctl, free space), then run again: the next run reads the table from the disk."
    )


class StoreUnsafeError(SinkError):
    """The storage cannot create an object only if it is absent, so commits could overwrite each other."""

    code = "store-unsafe"
    retryable = False
    exit_code = 1
    default_hint = "Use a store with conditional put (local disk, S3, GCS, Azure)."


class TableLostError(SinkError):
    """A table, or its log, is gone since it was claimed."""

    code = "table-lost"
    retryable = False
    exit_code = 1
    default_hint = "Restore the table's folder, _delta_log included, from a backup; to start over, name another table."


class TornCommitError(SinkError):
    """A commit file of a table was cut off."""

    code = "torn-commit"
    retryable = False
    exit_code = 1
    default_hint = "Stop every writer of the table, take the named file out of its log, and run again."


class FencedError(FirnlineError):
    """A newer generation owns this pipeline; this run must not write any more."""

    code = "fenced"
    exit_code = 5
    default_hint = "Another run of this pipeline took over; see `firnline status`."


class EngineError(FirnlineError):
    """Spark could not start or a job failed."""

    code = "engine"
    retryable = True
    exit_code = 3
    default_hint = "Run again; the epoch is repeated from the last checkpoint. --debug shows Spark's own words."


class WorkerLostError(EngineError):
    """A task did not come back: its worker died, hung, or did not end in time."""

    code = "worker-lost"
    default_hint = "The epoch is tried again; raise checkpoint.timeout_ms if its shards need longer than that."


class OperatorError(FirnlineError):
    """The code of an operator raised something; the same rows would make it do so again."""

    code = "operator"
    default_hint = "Correct the operator's code, or leave the row out by a query before it; nothing was committed."


class ControlError(FirnlineError):
    """A running pipeline could not be told something, or did not do it in time."""

    code = "control"
    default_hint = "See `firnline status`; the run itself goes on."


class NotRunningError(ControlError):
    """No run of the pipeline is reachable on this machine."""

    code = "not-running"
    default_hint = "`firnline status` tells who ran last; `firnline run` starts one."


class CheckpointError(FirnlineError):
    """What is stored cannot be trusted or used."""

    code = "checkpoint"
    default_hint = "See `firnline checkpoints`."


class DamagedError(CheckpointError):
    """A stored value does not match its checksum or its shape."""

    code = "damaged"
    default_hint = "Another copy is used where there is one; see `firnline checkpoints`."


class CheckpointLostError(CheckpointError):
    """No intact copy tells the newest epoch."""

    code = "checkpoint-lost"
    default_hint = "Restore the table's _delta_log or _firnline folder from a backup; Firnline does not guess."


class LedgerHoleError(CheckpointError):
    """An entry of the ledger chain is missing or damaged."""

    code = "ledger-hole"
    default_hint = "Late files cannot be told from processed ones. See what can be done: firnline ledger repair"


class StateDamagedError(CheckpointError):
    """A file of keyed state is missing, or does not match its checksum, and no other copy is intact."""

    code = "state-damaged"
    default_hint = "Bring the file back from a backup or the remote tier, or go back: see `firnline checkpoints`."


class NewerFormatError(CheckpointError):
    """Written by a newer Firnline than this one."""

    code = "newer-format"
    default_hint = "Upgrade Firnline on this machine: pip install -U firnline."


class VersionConflictError(CheckpointError):
    """A version was expected to be the newest in the store, and is not."""

    code = "version-conflict"
    default_hint = "Another process wrote to the store at the same time; look again and repeat."


class StoreReadOnlyError(CheckpointError):
    """The store is a view or a copy: what it shows is changed elsewhere."""

    code = "store-read-only"
    default_hint = "Use `firnline rollback`, which takes table and checkpoint back together."


class StoreAheadError(CheckpointError):
    """A store or a tier knows a newer epoch than the sink, which is the truth."""

    code = "store-ahead"
    default_hint = "The table was replaced or restored: bring back the right one, or delete the store's copy."


class SinkDivergedError(CheckpointError):
    """A sink after the deciding one holds an epoch that was never decided."""

    code = "sink-diverged"
    default_hint = "Restore the sink from a savepoint, or take it out of the spec: the others go on."


class DecidingSinkError(CheckpointError):
    """Another table than before would decide what an epoch is."""

    code = "deciding-sink"
    default_hint = "List the table that decided so far first among the sinks, and keep it required."


class StateIncompleteError(CheckpointError):
    """A checkpoint of state was never completed, was aborted, or lacks metadata."""

    code = "state-incomplete"
    default_hint = "See `firnline checkpoints`; another tier or an older checkpoint is used where there is one."


class StateLostError(CheckpointError):
    """No tier has an operator's state any more, and the epochs since an older one cannot be folded again."""

    code = "state-lost"
    default_hint = (
        "Bring the state's folder, the remote tier or the input files back; or go back to a savepoint, "
        "or start over: firnline run --fresh-after EPOCH --truncate"
    )


class StateConflictError(CheckpointError):
    """A checkpoint of state was begun or decided otherwise by somebody else; what stands there stays."""

    code = "state-conflict"
    default_hint = "Run again: the epoch is repeated under a new attempt, with files of its own."


class RollbackRefusedError(CheckpointError):
    """Going back, restoring or starting over is not possible as asked; nothing was changed."""

    code = "rollback-refused"
    default_hint = "See `firnline checkpoints` for where one can go back to."
