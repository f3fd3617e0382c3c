"""Stateful operators: the contract in `base`, and aggregate, deduplicate and correlate. `__all__` is public."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from firnline.lazy import load_name

if TYPE_CHECKING:
    from firnline.operators.base import (
        BEFORE,
        LATE,
        MAIN,
        OP,
        SEQUENCE,
        Assigned,
        Batch,
        EpochContext,
        Operator,
        Result,
    )

__all__ = [
    "BEFORE",
    "LATE",
    "MAIN",
    "OP",
    "SEQUENCE",
    "Assigned",
    "Batch",
    "EpochContext",
    "Operator",
    "Result",
]


def __getattr__(name: str) -> Any:
    """Load what needs Arrow only when it is used, so that importing the package stays cheap."""
    return load_name(__name__, name, __all__, {})
