"""The wheel and the sdist as a user gets them: what is inside, and a first pipeline in a clean environment."""

from __future__ import annotations

import email
import tarfile
import zipfile
from pathlib import Path

import pytest

import firnline
from tests.support.installed import ROOT, CleanEnvironment, build
from tests.support.pages import commands_in, run_commands
from tests.support.samples import table_ids

pytestmark = pytest.mark.spark
pytest.importorskip("hatchling", reason="`make install` installs the build backend")


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build(ROOT, tmp_path_factory.mktemp("wheel"), "wheel")


@pytest.fixture(scope="module")
def sdist(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build(ROOT, tmp_path_factory.mktemp("sdist"), "sdist")


def test_the_wheel_holds_the_package_and_nothing_else(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
        assert [name for name in names if str(ROOT).encode() in archive.read(name)] == []
        told = email.message_from_bytes(archive.read(f"firnline-{firnline.__version__}.dist-info/METADATA"))
    source = ROOT / "src"
    ours = {str(path.relative_to(source)) for path in source.rglob("*") if path.suffix in (".py", ".typed")}
    pages = source / "firnline" / "service" / "dashboard"
    ours |= {
        str(path.relative_to(source))
        for folder in ("templates", "static")
        for path in (pages / folder).rglob("*")
        if path.is_file()
    }
    information = {name for name in names if name.startswith("firnline-")}
    assert names - information == ours
    assert any(name.endswith("/licenses/LICENSE") for name in information)
    assert told["Version"] == firnline.__version__
    assert told["License-Expression"] == "Apache-2.0"
    assert told["Author"] == "Firnline contributors"
    assert "Typing :: Typed" in told.get_all("Classifier", [])


def test_the_sdist_builds_the_same_wheel(wheel: Path, sdist: Path, tmp_path: Path) -> None:
    with tarfile.open(sdist) as archive:
        assert not [name for name in archive.getnames() if "/tests/" in name or "/.ci" in name]
        archive.extractall(tmp_path / "source", filter="data")
    for path in (tmp_path / "source").rglob("*"):
        assert path.is_dir() or str(ROOT).encode() not in path.read_bytes(), path
    (source,) = (tmp_path / "source").iterdir()
    again = build(source, tmp_path / "wheel", "wheel")
    assert again.name == wheel.name
    assert again.read_bytes() == wheel.read_bytes()


def test_the_first_table_of_the_readme_in_a_clean_environment(
    wheel: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    clean = CleanEnvironment(tmp_path / "venv", wheel)
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("PYTHONPATH", raising=False)

    def firnline_command(words: list[str]) -> tuple[int, str]:
        done = clean.run(Path.cwd(), "firnline", *words)
        return done.returncode, done.stdout + done.stderr

    assert clean.run(tmp_path, "firnline", "--version").stdout.strip() == firnline.__version__
    assert clean.run(tmp_path, "python", "-m", "firnline", "--version").stdout.strip() == firnline.__version__
    _, _, section = (ROOT / "README.md").read_text().partition("## 60 seconds to the first table\n")
    commands = commands_in(section.partition("\n## ")[0])
    assert len(commands) >= 5
    run_commands(commands, tmp_path, firnline_command, str(clean.bin / "python"))
    assert table_ids(str(tmp_path / "flights" / "out")) == {1: 1, 2: 1}
    code, printed = firnline_command(["status"])
    assert code == 0, printed
    where = clean.run(tmp_path, "python", "-c", "import firnline; print(firnline.__file__)").stdout.strip()
    assert Path(where).is_relative_to(tmp_path)
