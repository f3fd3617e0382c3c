"""Building blocks for the models of a spec, for the folders of kinds. `__all__` is public."""

from __future__ import annotations

from typing import TYPE_CHECKING

from firnline.lazy import lazy_exports

if TYPE_CHECKING:
    from pydantic import Field

    from firnline.config.fields import (
        ColumnName,
        Config,
        Count,
        Duration,
        Endpoint,
        Flag,
        Location,
        Millis,
        Name,
        Ratio,
        ReadSecret,
        Retries,
        Seconds,
        Secret,
        Size,
        fail,
    )

__all__ = [
    "ColumnName",
    "Config",
    "Count",
    "Duration",
    "Endpoint",
    "Field",
    "Flag",
    "Location",
    "Millis",
    "Name",
    "Ratio",
    "ReadSecret",
    "Retries",
    "Seconds",
    "Secret",
    "Size",
    "fail",
]
_ELSEWHERE = {name: "pydantic" if name == "Field" else "firnline.config.fields" for name in __all__}

if not TYPE_CHECKING:  # pydantic is loaded when a model is defined: workers read no spec
    __getattr__, __dir__ = lazy_exports(__name__, __all__, _ELSEWHERE)
