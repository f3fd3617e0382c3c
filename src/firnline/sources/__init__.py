"""Sources: the contract in `base`, and one package per kind. `__all__` is public."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from firnline.lazy import load_name

if TYPE_CHECKING:
    from firnline.options import SourceOptions
    from firnline.sources.base import (
        Backlog,
        BadRecord,
        Budget,
        InputStatus,
        InputTracker,
        Limits,
        PositionView,
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
    from firnline.sources.registry import KINDS

__all__ = [
    "KINDS",
    "Backlog",
    "BadRecord",
    "Budget",
    "Columns",
    "InputStatus",
    "InputTracker",
    "Limits",
    "PositionView",
    "Reconciled",
    "RestartError",
    "Rows",
    "Source",
    "SourceOptions",
    "SourcePlan",
    "Split",
    "SplitEnd",
    "SplitReader",
]
_ELSEWHERE = {  # not in `base`
    "Columns": "firnline.sources.columns",
    "KINDS": "firnline.sources.registry",
    "SourceOptions": "firnline.options",
}


def __getattr__(name: str) -> Any:
    """Load what needs Arrow only when it is used, so that importing the package stays cheap."""
    return load_name(__name__, name, __all__, _ELSEWHERE)
