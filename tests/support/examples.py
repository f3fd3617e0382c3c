"""The modules of `examples/tracking`, which is no package."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

TRACKING = Path(__file__).parents[2] / "examples" / "tracking"


def load_example(name: str) -> ModuleType:
    """Import one module of the example by its file."""
    spec = importlib.util.spec_from_file_location(f"tracking_{name}", TRACKING / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module
