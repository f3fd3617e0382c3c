"""What is public is listed, and importing it is cheap."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import firnline

LIST = Path(__file__).parent.parent / "public_api.txt"


def test_public_names_are_pinned() -> None:
    assert sorted(firnline.__all__) == LIST.read_text().split()
    assert all(hasattr(firnline, name) for name in firnline.__all__)


def test_unknown_names_are_attribute_errors() -> None:
    assert not hasattr(firnline, "Nonsense")


def test_import_loads_nothing_heavy() -> None:
    heavy = ("pyspark", "pyarrow", "deltalake", "numba", "pandas")
    code = f"import firnline, sys; print([m for m in {heavy} if m in sys.modules])"
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert out.stdout.strip() == "[]"
