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
    compress_above_bytes: Count = Field(default=16 * 1024, description="Larger payloads are packed with zstd.")
    keep_versions: Count = Field(default=10_000, description="Versions that the store keeps of a checkpoint, at least.")
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
    """Checkpoints on this machine's disk: the fast way back."""

    path: Location = Field(description="A folder on this machine's own disk.")
    interval_ms: Count = Field(default=1000, description="Write at most once in so many milliseconds.")

    @field_validator("path")
    @classmethod
    def _is_local(cls, value: str) -> str:
        if "://" in value:
            raise fail("must be a folder on this machine; a bucket belongs to checkpoint.remote")
        return value


class RemoteTierConfig(Config):
    """Checkpoints where they outlive this machine."""

    other_words: ClassVar[dict[str, str]] = {"path": "uri", "url": "uri"}

    uri: Location = Field(description="Bucket and prefix (s3://, gs://, az://), or a folder on a mounted share.")
    interval_ms: Count = Field(default=60_000, description="Replicate at most once in so many milliseconds.")
    storage_options: dict[str, Secret] = Field(
        default={}, description="Credentials and endpoint; values may be ${env:NAME} or ${file:path}."
    )


class TriggerConfig(Config):
    """When a checkpoint of the state is made: at the first epoch that any of these asks for."""

    every_epochs: Count | None = Field(
        default=1, description="After so many epochs; off when only other triggers are given."
    )
    every_ms: Count | None = Field(default=None, description="When so many milliseconds have passed.")
    every_records: Count | None = Field(default=None, description="When so many records have come.")
    event_time: Duration | None = Field(
        default=None, description="When a watermark passes a multiple of this, e.g. 10m."
    )


class CheckpointConfig(Config):
    """Where checkpoints are kept, how they are found, and how long the way back is kept."""

    recovery_scan_commits: Count = Field(
        default=100, description="Commits that a first run reads backwards for another tool's progress."
    )
    rollback_window: Window = Field(
        default=64, description="How far one can go back: a number of epochs, or a time like 12h or 7d."
    )
    store: StoreConfig | None = Field(
        default=None,
        description="A copy of every checkpoint, the audit trail and the lease; files beside this one by default.",
    )
    local: LocalTierConfig | None = Field(default=None, description="Checkpoints on this machine's disk; off.")
    remote: RemoteTierConfig | None = Field(default=None, description="Checkpoints that outlive this machine; off.")
    lease_seconds: Seconds = Field(
        default=15.0, description="A standby takes over when the active run has been silent for so long."
    )
    mode: Literal["aligned", "per_operator"] = Field(
        default="aligned",
        description="aligned: all operators are snapshot at one epoch; per_operator: each at its own interval_ms.",
    )
    trigger: TriggerConfig = Field(
        default=TriggerConfig(), description="When a checkpoint of the state is made: at the first of these."
    )
    timeout_ms: Count = Field(
        default=60_000, description="Shards that have not reported by then are given up, with their checkpoint."
    )
    max_pause_ms: Count = Field(default=200, description="A longer pause for a checkpoint is warned about.")
    keep_checkpoints: Count = Field(default=3, description="Complete checkpoints of state that are kept, at least.")
    keep_aborted: Duration = Field(
        default=timedelta(hours=1),
        json_schema_extra={"default": "1h"},
        description="How long the files of an aborted checkpoint are kept, e.g. 1h.",
    )


__all__ = ["StateConfig"]

MAX_KEY_GROUPS = 32_768


class StateConfig(Config):
    """How keyed state is spread over tasks, and what happens when a worker is lost."""

    shards: Count | None = Field(
        default=None,
        description="Shards of the state, one task each; by default as many as tasks run at once.",
    )
    key_groups: Annotated[Count, Field(le=MAX_KEY_GROUPS)] = Field(
        default=128, description="Groups that keys fall into; fixed for the life of a pipeline."
    )
    on_worker_loss: Literal["replace", "absorb"] = Field(
        default="replace",
        description="replace waits for a new worker; absorb spreads its shards over the others until it is back.",
    )
    worker_ping_secs: Seconds = Field(
        default=5.0, description="Workers ping so often; one that misses four pings is lost."
    )
    dropped: tuple[Name, ...] = Field(
        default=(), description="Operators that are gone from this file and whose state may be forgotten."
    )

    @model_validator(mode="after")
    def _shards_have_groups(self) -> StateConfig:
        if self.shards is not None and self.shards > self.key_groups:
            raise fail(f"must be at most key_groups ({self.key_groups}), not {self.shards}", "shards")
        return self
