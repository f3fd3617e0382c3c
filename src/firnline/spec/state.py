"""The state section of a pipeline file: how keyed state is spread over tasks."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, model_validator

from firnline.spec.fieldtypes import Config, Count, Name, Seconds, fail

__all__ = ["StateConfig"]

MAX_KEY_GROUPS = 32_768


class StateConfig(Config):
    """How keyed state is spread over tasks, and what happens when a worker is lost."""

    shards: Count | None = Field(
        default=None, description="Parts of the state, one task each; by default as many as tasks run at once."
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
