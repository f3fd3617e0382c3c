"""Sources: the contract in `base`, and one package per kind. `__all__` is public."""

from __future__ import annotations

from typing import TYPE_CHECKING

from firnline.lazy import lazy_exports

if TYPE_CHECKING:
    from firnline.options import SourceOptions
    from firnline.rescued import Rescued
    from firnline.sources.base import (
        MAIN_PORT,
        Backlog,
        BadRecord,
        Budget,
        InputStatus,
        InputTracker,
        Limits,
        LogLag,
        PositionChange,
        PositionView,
        ReadColumns,
        Reconciled,
        RestartError,
        Rows,
        Source,
        SourcePlan,
        Split,
        SplitEnd,
        SplitReader,
    )
    from firnline.sources.columns import Columns
    from firnline.sources.config import SourceConfig
    from firnline.sources.registry import KINDS

__all__ = [
    "KINDS",
    "MAIN_PORT",
    "Backlog",
    "BadRecord",
    "Budget",
    "Columns",
    "InputStatus",
    "InputTracker",
    "Limits",
    "LogLag",
    "PositionChange",
    "PositionView",
    "ReadColumns",
    "Reconciled",
    "Rescued",
    "RestartError",
    "Rows",
    "Source",
    "SourceConfig",
    "SourceOptions",
    "SourcePlan",
    "Split",
    "SplitEnd",
    "SplitReader",
]
_ELSEWHERE = {  # not in `base`
    "Columns": "firnline.sources.columns",
    "KINDS": "firnline.sources.registry",
    "Rescued": "firnline.rescued",
    "SourceConfig": "firnline.sources.config",
    "SourceOptions": "firnline.options",
}

if not TYPE_CHECKING:  # what needs Arrow is loaded on first use: importing the package stays cheap
    __getattr__, __dir__ = lazy_exports(__name__, __all__, _ELSEWHERE)
