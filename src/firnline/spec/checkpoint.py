"""The sections `checkpoint` and `state` of a pipeline file."""

from __future__ import annotations

from datetime import timedelta
from typing import Annotated, ClassVar, Literal

from pydantic import Field, field_validator, model_validator

from firnline.spec.fieldtypes import Config, Count, Duration, Location, Name, Seconds, Secret, Window, fail

__all__ = ["CheckpointConfig", "LocalTierConfig", "RemoteTierConfig", "StoreConfig", "TriggerConfig"]


class StoreConfig(Config):
    """Where a copy of every checkpoint, the audit trail and the lease are kept."""

    other_words: ClassVar[dict[str, str]] = {"url": "uri", "folder": "path", "file": "path", "kind": "type"}

    type: Literal["file", "sqlite", "postgres", "object", "memory"] = Field(
        default="file", description="Kind of store; docs/stores.md helps to choose."
    )
    path: Location | None = Field(
        default=None,
        description="file: the folder (data/firnline_checkpoints by default). sqlite: the file. Relative to this file.",
    )
    uri: Location | None = Field(
        default=None, description="object: bucket and prefix (s3://, gs://, az://), or a folder."
    )
    dsn: Secret | None = Field(default=None, description="postgres: connection string, e.g. ${env:CHECKPOINTS_DSN}.")
    compress_above_bytes: Count = Field(default=16 * 1024, description="Compress larger payloads with zstd.")
    keep_versions: Count = Field(default=10_000, description="Minimum number of checkpoint versions to keep.")
    storage_options: dict[str, Secret] = Field(
        default={}, description="object: credentials and endpoint; values may be ${env:NAME} or ${file:path}."
    )

    @model_validator(mode="after")
    def _place_fits_type(self) -> StoreConfig:
        for key, kinds in (("uri", ("object",)), ("dsn", ("postgres",)), ("path", ("file", "sqlite"))):
            given = key in self.model_fields_set
            if given and self.type not in kinds:
                raise fail(f"is for type: {' or '.join(kinds)}, not {self.type}", key)
            if not given and self.type in kinds and (key != "path" or self.type == "sqlite"):
                raise fail(f"type: {self.type} needs it", key)
        return self


class LocalTierConfig(Config):
    """Checkpoint copies on this machine's disk, for fast recovery."""

    path: Location = Field(description="A folder on this machine's own disk.")
    interval_ms: Count = Field(default=1000, description="Minimum time between two writes, in milliseconds.")

    @field_validator("path")
    @classmethod
    def _is_local(cls, value: str) -> str:
        if "://" in value:
            raise fail("must be a folder on this machine; a bucket belongs to checkpoint.remote")
        return value


class RemoteTierConfig(Config):
    """Checkpoint copies that survive the loss of this machine."""

    other_words: ClassVar[dict[str, str]] = {"path": "uri", "url": "uri"}

    uri: Location = Field(description="Bucket and prefix (s3://, gs://, az://), or a folder on a mounted share.")
    interval_ms: Count = Field(default=60_000, description="Minimum time between two replications, in milliseconds.")
    storage_options: dict[str, Secret] = Field(
        default={}, description="Credentials and endpoint; values may be ${env:NAME} or ${file:path}."
    )


class TriggerConfig(Config):
    """When to checkpoint state: at the first epoch at which one of these triggers fires."""

    every_epochs: Count | None = Field(
        default=1, description="After this many epochs; off if only other triggers are given."
    )
    every_ms: Count | None = Field(default=None, description="After this many milliseconds.")
    every_records: Count | None = Field(default=None, description="After this many records.")
    event_time: Duration | None = Field(
        default=None, description="When a watermark passes a multiple of this, e.g. 10m."
    )


class CheckpointConfig(Config):
    """Copies of checkpoints, how recovery finds them, and how far back a rollback can go."""

    recovery_scan_commits: Count = Field(
        default=100, description="Number of commits that a first run searches backwards for another tool's progress."
    )
    rollback_window: Window = Field(
        default=64, description="How far back a rollback can go: a number of epochs, or a time like 12h or 7d."
    )
    store: StoreConfig | None = Field(
        default=None,
        description="A copy of every checkpoint, the audit trail and the lease; files beside the spec by default.",
    )
    local: LocalTierConfig | None = Field(
        default=None, description="Local tier: checkpoint copies on this machine's disk; off by default."
    )
    remote: RemoteTierConfig | None = Field(
        default=None, description="Remote tier: checkpoint copies that survive this machine; off by default."
    )
    lease_seconds: Seconds = Field(
        default=15.0, description="A standby takes over if the active run has not renewed the lease for this long."
    )
    mode: Literal["aligned", "per_operator"] = Field(
        default="aligned",
        description="aligned: snapshot all operators at one epoch; per_operator: each at its own interval_ms.",
    )
    trigger: TriggerConfig = Field(
        default=TriggerConfig(), description="When to checkpoint state: at the first trigger that fires."
    )
    timeout_ms: Count = Field(
        default=60_000, description="Abort a state checkpoint whose shards have not all reported after this time."
    )
    max_pause_ms: Count = Field(default=200, description="Warn if a checkpoint pauses the epoch for longer.")
    keep_checkpoints: Count = Field(default=3, description="Minimum number of complete state checkpoints to keep.")
    keep_aborted: Duration = Field(
        default=timedelta(hours=1),
        json_schema_extra={"default": "1h"},
        description="How long to keep the files of an aborted checkpoint, e.g. 1h.",
    )


__all__ = ["StateConfig"]

MAX_KEY_GROUPS = 32_768


class StateConfig(Config):
    """Keyed state: its distribution over tasks, and the reaction to a lost worker."""

    shards: Count | None = Field(
        default=None,
        description="Shards of the state, one task each; by default as many as tasks run at once.",
    )
    key_groups: Annotated[Count, Field(le=MAX_KEY_GROUPS)] = Field(
        default=128, description="Number of key groups; fixed for the life of a pipeline."
    )
    on_worker_loss: Literal["replace", "absorb"] = Field(
        default="replace",
        description="replace waits for a new worker; absorb moves its shards to the other workers until it returns.",
    )
    worker_ping_secs: Seconds = Field(
        default=5.0, description="Heartbeat interval of workers; a worker that misses four heartbeats is lost."
    )
    dropped: tuple[Name, ...] = Field(
        default=(), description="Operators that were removed from this file and whose state may be deleted."
    )

    @model_validator(mode="after")
    def _shards_have_groups(self) -> StateConfig:
        if self.shards is not None and self.shards > self.key_groups:
            raise fail(f"must be at most key_groups ({self.key_groups}), not {self.shards}", "shards")
        return self
