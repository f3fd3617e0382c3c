"""Kinds of installed packages: used like built-in ones, and a broken or clashing one stops only what uses it."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from firnline import kinds
from firnline.errors import ConfigError, SpecError
from firnline.kinds import load_kind
from firnline.sinks import registry as sinks
from firnline.sources import registry as sources
from firnline.spec.build import load_options
from firnline.testing.local import run_locally
from tests.support.packages import install
from tests.support.samples import table_ids
from tests.support.shop import write_changes

SHOP = """
from typing import Literal

from firnline.config import Field, Location
from firnline.sources import SourceConfig
from tests.support.shop import ShopOptions, describe, open_reader, open_source


class ShopConfig(SourceConfig):
    '''Changes of a shop.'''

    options_class = ShopOptions
    ports = None
    type: Literal["shop"] = Field(description="Kind of source.")
    path: Location = Field(description="File of changes.")


def config_model():
    return ShopConfig
"""
SPEC = """\
name: p
sources:
  s: {type: TYPE, path: changes}
sinks:
  - table: out
"""
FILES = "name: p\nsources:\n  s: {type: files, path: in}\nsinks:\n  - table: out\n"

Install = Callable[..., Path]


@pytest.fixture
def installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Install]:
    """Installs packages into a folder of their own; what was imported of them is gone after the test."""
    folder = tmp_path / "site"
    monkeypatch.syspath_prepend(str(folder))

    def put(*names: object, **modules: object) -> Path:
        install(folder, *names, **modules)  # type: ignore[arg-type]  # passed on as they are
        kinds._entry_points.cache_clear()  # no process installs a package while it runs
        return folder

    yield put
    for module in [name for name, found in sys.modules.items() if str(folder) in str(getattr(found, "__file__", ""))]:
        del sys.modules[module]


def options_of(folder: Path, text: str) -> object:
    path = folder / "firnline.yml"
    path.write_text(text)
    return load_options(path, environ={}, cwd=folder)


def refusal(folder: Path, text: str) -> str:
    with pytest.raises(SpecError) as caught:
        options_of(folder, text)
    return caught.value.message


def test_a_pipeline_reads_by_the_kind_of_an_installed_package(tmp_path: Path, installed: Install) -> None:
    installed("acme-shop", {"firnline.sources": {"shop": "acme_shop"}}, acme_shop=SHOP)
    write_changes(tmp_path / "changes", ("", {"id": 1}), ("", {"id": 2}))
    built = options_of(tmp_path, SPEC.replace("TYPE", "shop"))
    assert run_locally(built).records == 2  # type: ignore[arg-type]  # options
    assert sorted(table_ids(tmp_path / "out")) == [1, 2]
    assert sources.describe({"changes": "c", "line": 2}) != sources.describe({"other": 1})


def test_every_process_that_has_the_package_knows_its_kinds(tmp_path: Path, installed: Install) -> None:
    folder = installed("acme-shop", {"firnline.sinks": {"shop": "acme_shop"}}, acme_shop="open_sink = 'mine'\n")
    code = "from firnline.sinks import registry as r; print(r.load_kind(r.KINDS, 'sink', 'shop').open_sink)"
    environ = {**os.environ, "PYTHONPATH": os.pathsep.join([str(folder), os.environ.get("PYTHONPATH", "")])}
    done = subprocess.run([sys.executable, "-c", code], env=environ, capture_output=True, text=True, cwd=tmp_path)
    assert done.stdout.strip() == "mine", done.stderr


@pytest.mark.parametrize(
    ("module", "reason"),
    [
        (
            "import nowhere_to_be_found",
            "cannot be imported: ModuleNotFoundError: No module named 'nowhere_to_be_found'",
        ),
        ("1 / 0", "cannot be imported: ZeroDivisionError: division by zero"),
        ("def config_model():\n    raise RuntimeError('no model')", "has no model: RuntimeError: no model"),
    ],
)
def test_a_broken_package_is_an_error_only_where_its_kind_is_used(
    tmp_path: Path, installed: Install, module: str, reason: str
) -> None:
    installed("acme-shop", {"firnline.sources": {"shop": "acme_broken"}}, acme_broken=module)
    assert options_of(tmp_path, FILES) is not None
    message = f"firnline.yml:3: sources.s.type: the source kind 'shop' of acme-shop 1.0 {reason}"
    assert refusal(tmp_path, SPEC.replace("TYPE", "shop")) == message


def test_a_worker_says_which_package_is_broken(installed: Install) -> None:
    installed("acme-shop", {"firnline.sinks": {"shop": "acme_broken"}}, acme_broken="1 / 0")
    with pytest.raises(ConfigError, match=r"the sink kind 'shop' of acme-shop 1\.0 cannot be imported"):
        load_kind(sinks.KINDS, "sink", "shop")


def test_a_name_that_is_built_in_is_refused_with_both_names(tmp_path: Path, installed: Install) -> None:
    installed("acme-files", {"firnline.sources": {"files": "acme_files"}}, acme_files=SHOP)
    built_in = sources.KINDS["files"]
    message = f"the source kind 'files' is taken twice: by {built_in} of firnline and acme_files of acme-files 1.0"
    assert message in refusal(tmp_path, FILES)
    assert message in refusal(tmp_path, FILES.replace("type: files, ", ""))


def test_a_name_of_two_packages_is_refused_with_both_names(tmp_path: Path, installed: Install) -> None:
    installed("acme-shop", {"firnline.sources": {"shop": "acme_shop"}}, acme_shop=SHOP)
    installed("best-shop", {"firnline.sources": {"shop": "best_shop"}}, best_shop=SHOP)
    message = "taken twice: by acme_shop of acme-shop 1.0 and best_shop of best-shop 1.0"
    assert message in refusal(tmp_path, SPEC.replace("TYPE", "shop"))
    assert options_of(tmp_path, FILES) is not None
    with pytest.raises(ConfigError) as caught:
        load_kind(sources.KINDS, "source", "shop")
    assert message in caught.value.message


def test_an_unknown_kind_names_those_of_packages_too(tmp_path: Path, installed: Install) -> None:
    installed("acme-shop", {"firnline.sources": {"shop": "acme_shop"}}, acme_shop=SHOP)
    assert 'did you mean "shop"?' in refusal(tmp_path, SPEC.replace("TYPE", "shpo"))
    with pytest.raises(ConfigError, match="no kind of source 'shpo'") as caught:
        load_kind(sources.KINDS, "source", "shpo")
    assert "shop" in caught.value.hint
