"""Sinks: the contract in `base`, and one package per kind. `__all__` is public."""

from __future__ import annotations

from typing import TYPE_CHECKING

from firnline.lazy import lazy_exports

if TYPE_CHECKING:
    from firnline.checkpoint.model import Checkpoint
    from firnline.faults import fault_point
    from firnline.options import Home, SinkOptions
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
    from firnline.sinks.config import SinkConfig
    from firnline.sinks.delta.options import DeltaSinkOptions
    from firnline.sinks.registry import KINDS
    from firnline.types import Delivery, EntryRef, Receipt

__all__ = [
    "KINDS",
    "Capabilities",
    "Checkpoint",
    "Decided",
    "Delivery",
    "DeltaSinkOptions",
    "Effect",
    "EntryRef",
    "EpochCommit",
    "Fence",
    "GoesBack",
    "Head",
    "Home",
    "KeepRows",
    "LoggedCommit",
    "Receipt",
    "ReplaceRows",
    "RestoreVersion",
    "RunTasks",
    "Sink",
    "SinkConfig",
    "SinkContext",
    "SinkOptions",
    "SinkReturn",
    "Stager",
    "Stranger",
    "fault_point",
]
_ELSEWHERE = {  # not in `base`
    "Checkpoint": "firnline.checkpoint.model",
    "Delivery": "firnline.types",
    "DeltaSinkOptions": "firnline.sinks.delta.options",
    "EntryRef": "firnline.types",
    "Home": "firnline.options",
    "KINDS": "firnline.sinks.registry",
    "Receipt": "firnline.types",
    "SinkConfig": "firnline.sinks.config",
    "SinkOptions": "firnline.options",
    "fault_point": "firnline.faults",
}

if not TYPE_CHECKING:  # what needs Arrow is loaded on first use: importing the package stays cheap
    __getattr__, __dir__ = lazy_exports(__name__, __all__, _ELSEWHERE)
