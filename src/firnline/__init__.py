"""Exactly-once, checkpointed data pipelines on Spark.

Every result and the progress that produced it become true together: `Pipeline` runs one, `PipelineOptions` is what
a spec becomes, `FirnlineError` is the root of what it raises.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from firnline.errors import FirnlineError
from firnline.lazy import load_name

if TYPE_CHECKING:
    from firnline.options import PipelineOptions
    from firnline.pipeline import Pipeline

__version__ = "0.1.0"
__all__ = ["FirnlineError", "Pipeline", "PipelineOptions", "__version__"]
_ELSEWHERE = {"Pipeline": "firnline.pipeline", "PipelineOptions": "firnline.options"}


def __getattr__(name: str) -> Any:
    """Load what needs Arrow and Delta only when it is used, so that `import firnline` stays cheap."""
    return load_name(__name__, name, __all__, _ELSEWHERE)
