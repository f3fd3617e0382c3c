"""Stateful operators: the contract (`base`), aggregate, deduplicate and correlate, and users' own classes (`loading`).

The names in `__all__` are public.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from firnline.lazy import lazy_exports

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

if not TYPE_CHECKING:  # what needs Arrow is loaded on first use: importing the package stays cheap
    __getattr__, __dir__ = lazy_exports(__name__, __all__, {})
