"""What is public is listed, and importing it is cheap."""

from __future__ import annotations

import importlib
import subprocess
import sys
from pathlib import Path

import pytest

import firnline

LIST = Path(__file__).parent.parent / "public_api.txt"
PACKAGES = ("firnline", "firnline.operators", "firnline.sinks", "firnline.sources", "firnline.stores")
TESTING = ("faults", "local", "operators", "sinks", "sources", "store_writers", "stores")
MODULES = (*PACKAGES, *(f"firnline.testing.{name}" for name in TESTING))


def test_public_names_are_pinned() -> None:
    found = [f"{module}.{name}" for module in MODULES for name in importlib.import_module(module).__all__]
    assert sorted(found) == LIST.read_text().split()


@pytest.mark.parametrize("name", MODULES)
def test_every_public_name_is_there(name: str) -> None:
    module = importlib.import_module(name)
    assert all(hasattr(module, exported) for exported in module.__all__)
    assert not hasattr(module, "Nonsense")


def test_the_modules_for_tests_are_all_public() -> None:
    folder = Path(firnline.__file__).parent / "testing"
    assert sorted(path.stem for path in folder.glob("*.py") if path.stem != "__init__") == sorted(TESTING)


@pytest.mark.parametrize("package", ["firnline", "firnline.operators", "firnline.sinks", "firnline.sources"])
def test_import_loads_nothing_heavy(package: str) -> None:
    heavy = ("pyspark", "pyarrow", "deltalake", "numba", "pandas")
    code = f"import {package}, sys; print([m for m in {heavy} if m in sys.modules])"
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert out.stdout.strip() == "[]"
