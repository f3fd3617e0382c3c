"""The modules of the examples, which are no packages."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

TRACKING = Path(__file__).parents[2] / "examples" / "tracking"
CHAIN = TRACKING.parent / "chain"


def load_example(name: str, folder: Path = TRACKING) -> ModuleType:
    """Import one module of an example by its file."""
    spec = importlib.util.spec_from_file_location(f"{folder.name}_{name}", folder / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module
