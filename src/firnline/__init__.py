"""Exactly-once, checkpointed data pipelines on Spark.

Every result and the progress that produced it become true together: `Pipeline` runs one, `FirnlineError` is the
root of what it raises.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from firnline.errors import FirnlineError

if TYPE_CHECKING:
    from firnline.pipeline import Pipeline

__version__ = "0.1.0"
__all__ = ["FirnlineError", "Pipeline", "__version__"]


def __getattr__(name: str) -> Any:
    """Load what needs Arrow and Delta only when it is used, so that `import firnline` stays cheap."""
    if name == "Pipeline":
        from firnline.pipeline import Pipeline

        return Pipeline
    raise AttributeError(f"module 'firnline' has no attribute {name!r}")
