"""Machine code is shared by the users of an installation, never taken from a folder of everybody, never stale."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from numba.core import config as numba_config

from firnline import installed, jit

KERNEL = "from firnline.jit import entry\nfrom firnline.part import scan\nfrom firnline.other import name\n"
PART = "from firnline.jit import compiled\n"


def work() -> None: ...


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A package with a compiled module, one that it calls, and one that has nothing to do with it."""
    folder = tmp_path / "firnline"
    folder.mkdir()
    for name, text in (("kernel", KERNEL), ("part", PART), ("other", "name = 1\n")):
        (folder / f"{name}.py").write_text(text)
    monkeypatch.setattr(installed, "PACKAGE", folder)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(numba_config, "CACHE_DIR", "")
    return folder


def locate(package: Path) -> Any:
    jit._digest.cache_clear()
    return jit._Locator.from_function(work, str(package / "kernel.py"))


def compile_into(folder: Path, locator: Any) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"kernel.work-{locator.get_disambiguator()}.py311.nbi"
    path.write_bytes(b"index")
    return path


def test_code_lies_beside_its_module_where_that_can_be_written(package: Path) -> None:
    assert locate(package).get_cache_path() == str(package / "__pycache__")


def test_code_of_the_installation_serves_users_who_may_not_write_there(
    package: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    compile_into(package / "__pycache__", locate(package))
    monkeypatch.setattr(installed, "ensure_folder", lambda _: pytest.fail("nothing is to be written"))
    assert locate(package).get_cache_path() == str(package / "__pycache__")


@pytest.mark.parametrize(
    "spoil",
    [
        lambda path: path.chmod(0o666),
        lambda path: path.parent.chmod(0o777),
        pytest.param(
            lambda path: os.chown(path, 12345, 12345),
            marks=pytest.mark.skipif(os.geteuid() != 0, reason="only root gives files away"),
        ),
    ],
)
def test_code_that_others_could_have_changed_is_not_used(package: Path, spoil: Callable[[Path], None]) -> None:
    path = compile_into(installed.user_cache(), locate(package))
    assert locate(package).get_cache_path() == str(path.parent)
    spoil(path)
    assert locate(package).get_cache_path() == str(package / "__pycache__")


def test_without_a_folder_to_write_to_every_process_compiles_for_itself(
    package: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(installed, "ensure_folder", lambda _: None)
    locator = locate(package)
    assert locator.is_private
    os.rmdir(locator.get_cache_path())


@pytest.mark.parametrize(("changed", "other"), [("kernel", True), ("part", True), ("other", False)])
def test_code_is_compiled_again_when_what_it_consists_of_changes(package: Path, changed: str, *, other: bool) -> None:
    before = locate(package).get_source_stamp()
    with (package / f"{changed}.py").open("a") as stream:
        stream.write("# changed\n")
    assert (locate(package).get_source_stamp() != before) == other


def test_another_processor_has_other_code(package: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = locate(package).get_disambiguator()
    monkeypatch.setattr(numba_config, "CPU_NAME", "generic")
    assert locate(package).get_disambiguator() != before


def test_a_folder_that_the_user_names_for_numba_wins(package: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(numba_config, "CACHE_DIR", "/somewhere")
    assert locate(package) is None


def test_functions_of_other_packages_are_left_to_numba(package: Path, tmp_path: Path) -> None:
    (tmp_path / "own.py").write_text(KERNEL)
    assert jit._Locator.from_function(work, str(tmp_path / "own.py")) is None


def test_the_kernel_uses_this_cache() -> None:
    from firnline.ndjson import kernel

    if not getattr(numba_config, "CACHE_DIR", ""):
        assert isinstance(kernel.scan._cache._impl.locator, jit._Locator)
        assert {path.name for path in jit._sources(Path(kernel.__file__))} == {
            "jit.py", "kernel.py", "numbers.py", "text.py"
        }  # fmt: skip
