"""What is public is listed, and importing it is cheap."""

from __future__ import annotations

import ast
import importlib
import re
import subprocess
import sys
from pathlib import Path
from typing import assert_type

import pytest

import firnline
from firnline import pipeline as pipeline_module

LIST = Path(__file__).parent.parent / "public_api.txt"
ROOT = LIST.parent.parent
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
PACKAGES = (
    "firnline",
    "firnline.config",
    "firnline.operators",
    "firnline.sinks",
    "firnline.sources",
    "firnline.stores",
)
ERRORS = "firnline.errors"
TESTING = ("faults", "local", "operators", "sinks", "sources", "stores")
MODULES = (*PACKAGES, ERRORS, *(f"firnline.testing.{name}" for name in TESTING))
AIRFLOW = "firnline.airflow"  # imports Airflow, which is not installed here


def test_public_names_are_pinned() -> None:
    found = [f"{module}.{name}" for module in MODULES for name in importlib.import_module(module).__all__]
    assert sorted([*found, *airflow_names()]) == LIST.read_text().split()


def airflow_names() -> list[str]:
    tree = ast.parse((ROOT / "src" / "firnline" / "airflow.py").read_text())
    lists = [node.value for node in tree.body if isinstance(node, ast.Assign) and "__all__" in ast.unparse(node)]
    return [f"{AIRFLOW}.{name}" for name in ast.literal_eval(lists[0])]


@pytest.mark.parametrize("name", MODULES)
def test_every_public_name_is_there(name: str) -> None:
    module = importlib.import_module(name)
    assert all(hasattr(module, exported) for exported in module.__all__)
    assert not hasattr(module, "Nonsense")


def test_completion_lists_every_public_name_before_it_is_loaded() -> None:
    lazy = ("firnline", "firnline.operators", "firnline.sinks", "firnline.sources")
    code = "import importlib, sys\nfor name in sys.argv[1:]:\n    module = importlib.import_module(name)\n"
    code += "    print(*{*module.__all__, '__all__', '__file__'} - set(dir(module)))\n"
    code += "    print(*{'TYPE_CHECKING', 'annotations', 'lazy_exports'} & set(dir(module)))"
    out = subprocess.run([sys.executable, "-c", code, *lazy], capture_output=True, text=True, check=True)
    assert out.stdout.split() == []


def test_type_checkers_know_each_name_and_refuse_others() -> None:
    """`make lint` proves it: mypy reports an unknown name in `__all__`, and an ignored error that is none."""
    assert_type(firnline.Pipeline, type[pipeline_module.Pipeline])
    with pytest.raises(AttributeError, match="no attribute 'Nonsense'"):
        firnline.Nonsense  # type: ignore[attr-defined]  # noqa: B018


def test_the_package_carries_its_types() -> None:
    assert (Path(firnline.__file__).parent / "py.typed").exists()


def test_the_modules_for_tests_are_all_public() -> None:
    folder = Path(firnline.__file__).parent / "testing"
    assert sorted(path.stem for path in folder.glob("*.py") if path.stem != "__init__") == sorted(TESTING)


@pytest.mark.parametrize("package", ["firnline", "firnline.operators", "firnline.sinks", "firnline.sources"])
def test_import_loads_nothing_heavy(package: str) -> None:
    heavy = ("pyspark", "pyarrow", "deltalake", "numba", "pandas")
    code = f"import {package}, sys; print([m for m in {heavy} if m in sys.modules])"
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert out.stdout.strip() == "[]"


def test_every_error_is_public() -> None:
    errors = importlib.import_module(ERRORS)
    classes = {name for name, value in vars(errors).items() if isinstance(value, type) and value.__module__ == ERRORS}
    assert classes == set(errors.__all__)


@pytest.mark.parametrize("page", PAGES, ids=lambda p: str(p.relative_to(ROOT)))
def test_pages_use_public_names_alone(page: Path) -> None:
    public = {*LIST.read_text().split(), *MODULES, AIRFLOW}
    for block in re.findall(r"```python\n(.*?)```", page.read_text(), re.DOTALL):
        assert used_names(block) <= public, f"{page.name}: {sorted(used_names(block) - public)}"


def test_names_that_a_block_uses_are_found() -> None:
    block = "import firnline\nfrom firnline import sinks\nfrom firnline.run.runner import (\n    Runner,\n)\n"
    assert used_names(block + "sinks.KINDS['x'] = firnline.Pipeline.load\n") == {
        "firnline", "firnline.sinks", "firnline.run.runner.Runner", "firnline.sinks.KINDS", "firnline.Pipeline",
    }  # fmt: skip


def used_names(block: str) -> set[str]:
    """The names of firnline that a block imports, or takes from a module that it imports."""
    tree = ast.parse(block)
    found: set[str] = set()
    modules: dict[str, str] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for one in node.names:
                if one.name.split(".")[0] == "firnline":
                    found.add(one.name)
                    modules[one.asname or "firnline"] = one.name if one.asname else "firnline"
        elif isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "firnline":
            for one in node.names:
                name = f"{node.module}.{one.name}"
                found.add(name)
                if name in MODULES:
                    modules[one.asname or one.name] = name
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id in modules:
            found.add(f"{modules[node.value.id]}.{node.attr}")
    return found
