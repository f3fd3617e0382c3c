"""Sinks: the contract in `base`, and one package per kind. `__all__` is public."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from firnline.lazy import load_name

if TYPE_CHECKING:
    from firnline.options import DeltaSinkOptions, SinkOptions
    from firnline.sinks.base import (
        Capabilities,
        Decided,
        Effect,
        EpochCommit,
        Fence,
        GoesBack,
        Head,
        KeepRows,
        LoggedCommit,
        ReplaceRows,
        RestoreVersion,
        RunTasks,
        Sink,
        SinkContext,
        SinkReturn,
        Stager,
        Stranger,
    )
    from firnline.sinks.registry import KINDS
    from firnline.types import Delivery, EntryRef, Receipt

__all__ = [
    "KINDS",
    "Capabilities",
    "Decided",
    "Delivery",
    "DeltaSinkOptions",
    "Effect",
    "EntryRef",
    "EpochCommit",
    "Fence",
    "GoesBack",
    "Head",
    "KeepRows",
    "LoggedCommit",
    "Receipt",
    "ReplaceRows",
    "RestoreVersion",
    "RunTasks",
    "Sink",
    "SinkContext",
    "SinkOptions",
    "SinkReturn",
    "Stager",
    "Stranger",
]
_ELSEWHERE = {  # not in `base`
    "Delivery": "firnline.types",
    "DeltaSinkOptions": "firnline.options",
    "EntryRef": "firnline.types",
    "KINDS": "firnline.sinks.registry",
    "Receipt": "firnline.types",
    "SinkOptions": "firnline.options",
}


def __getattr__(name: str) -> Any:
    """Load what needs Arrow only when it is used, so that importing the package stays cheap."""
    return load_name(__name__, name, __all__, _ELSEWHERE)
