"""The options of a Delta source."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import ClassVar, Literal

from firnline.options import SourceOptions


@dataclass(frozen=True, slots=True)
class DeltaSourceOptions(SourceOptions):
    """The versions of a Delta table."""

    type: ClassVar[str] = "delta"
    waits_for: ClassVar[str] = "table version"

    table: str  # absolute path or URI
    start: Literal["beginning", "now"] | int = "beginning"  # a number: the commits from this version on
    on_change: Literal["fail", "ignore", "change_feed"] = "fail"  # how commits that change or delete rows are treated
    storage_options: Mapping[str, str] = field(default_factory=dict, repr=False)

    @property
    def location(self) -> str:
        return self.table
