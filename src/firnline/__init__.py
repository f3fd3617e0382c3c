"""Exactly-once, checkpointed data pipelines on Spark.

Every result and the progress that produced it become true together: `Pipeline` runs one, `Run` is the handle of a run
on a thread of its own, `PipelineOptions` is what
a spec becomes, `FirnlineError` is the root of what it raises.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from firnline.errors import FirnlineError
from firnline.lazy import lazy_exports

if TYPE_CHECKING:
    from firnline.options import PipelineOptions
    from firnline.pipeline import Pipeline, Run

__version__ = "0.1.0"
__all__ = ["FirnlineError", "Pipeline", "PipelineOptions", "Run", "__version__"]
_ELSEWHERE = {"Pipeline": "firnline.pipeline", "PipelineOptions": "firnline.options", "Run": "firnline.pipeline"}

if not TYPE_CHECKING:  # what needs Arrow and Delta is loaded on first use: importing the package stays cheap
    __getattr__, __dir__ = lazy_exports(__name__, __all__, _ELSEWHERE)
