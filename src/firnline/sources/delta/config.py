"""The keys of a Delta source in a spec."""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal, TypeAlias

from pydantic import Field

from firnline.config.fields import Endpoint, Flag, Location, Seconds, Secret
from firnline.sources.config import SourceConfig
from firnline.sources.delta.options import DeltaSourceOptions

Version: TypeAlias = Annotated[int, Field(strict=True, ge=0)]


class DeltaSourceConfig(SourceConfig):
    """A Delta source: reads a table, and then every version that is added to it."""

    other_words: ClassVar[dict[str, str]] = {
        "uri": "table",
        "url": "table",
        "path": "table",
        "starting_version": "start",
        "startingVersion": "start",
    }
    options_class = DeltaSourceOptions

    type: Literal["delta"] = Field(description="Kind of source.")
    table: Location = Field(
        description="Path or URI of the table; relative to this file. A run waits for a table that does not exist yet."
    )
    start: Literal["beginning", "now"] | Version = Field(
        default="beginning",
        description="Where a pipeline without a checkpoint begins. beginning: the rows that the table has, then every "
        "later version; now: only later versions; a number: the commits from this version on.",
    )
    on_change: Literal["fail", "ignore", "change_feed"] = Field(
        default="fail",
        description="A commit that changes or deletes rows: fail stops the run, ignore passes over the whole commit "
        "(counted and logged), change_feed reads changes as rows with _change_type, _commit_version and "
        "_commit_timestamp.",
    )
    poll_interval_secs: Seconds = Field(default=1, description="Seconds between two checks for new versions.")
    lineage: Flag = Field(
        default=False,
        description="Add the columns _firnline_file, _firnline_record, _firnline_epoch, _firnline_upstream_version, "
        "_firnline_upstream_pipeline and _firnline_upstream_epoch.",
    )
    storage_options: dict[str, Secret] = Field(
        default={}, description="Credentials and endpoints of the store; values may be ${env:NAME} or ${file:path}."
    )

    @property
    def endpoint(self) -> Endpoint:
        return Endpoint("table", self.table)
