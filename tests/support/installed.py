"""Firnline as a user installs it: built from the source tree, in an environment that holds its dependencies alone."""

from __future__ import annotations

import os
import subprocess
import sys
import sysconfig
import venv
from importlib.metadata import Distribution, distribution
from pathlib import Path

from packaging.requirements import Requirement

ROOT = Path(__file__).parent.parent.parent
SECONDS = 300


def build(source: Path, folder: Path, kind: str) -> Path:
    """Build the wheel or the sdist of a source tree with the build backend that `pyproject.toml` names."""
    command = [sys.executable, "-m", "hatchling", "build", "-t", kind, "-d", str(folder)]
    subprocess.run(command, cwd=source, env=clean_environment(), capture_output=True, check=True, timeout=SECONDS)
    (built,) = folder.iterdir()
    return built


def clean_environment() -> dict[str, str]:
    """The environment without what would let a child find the source tree."""
    return {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}


class CleanEnvironment:
    """A virtual environment with a wheel, and links to the distributions that the wheel declares as dependencies.

    Nothing else is there: an import of a package that only developers have fails, as it does for a user.
    """

    def __init__(self, folder: Path, wheel: Path) -> None:
        venv.create(folder, with_pip=False, symlinks=True)
        self.bin = folder / "bin"
        self.packages = Path(sysconfig.get_path("purelib", "venv", {"base": str(folder), "platbase": str(folder)}))
        pip = [sys.executable, "-m", "pip", "--python", str(self.bin / "python"), "install"]
        subprocess.run(
            [*pip, "--quiet", "--no-deps", "--no-index", str(wheel)],
            env=clean_environment(), check=True, timeout=SECONDS,
        )  # fmt: skip
        (metadata,) = self.packages.glob("firnline-*.dist-info")
        for dependency in dependencies(Distribution.at(metadata)):
            self._link(dependency)

    def _link(self, dependency: Distribution) -> None:
        for name in {path.parts[0] for path in dependency.files or ()} - {"..", "__pycache__"}:
            target, link = Path(str(dependency.locate_file(name))), self.packages / name
            if target.exists() and not link.exists():
                link.symlink_to(target)

    def run(self, folder: Path, command: str, *arguments: str) -> subprocess.CompletedProcess[str]:
        """Run a program of the environment as a user would, from a folder."""
        environment = {**clean_environment(), "PATH": f"{self.bin}{os.pathsep}{os.environ['PATH']}"}
        return subprocess.run(
            [str(self.bin / command), *arguments], cwd=folder, env=environment, capture_output=True, text=True,
            stdin=subprocess.DEVNULL, timeout=SECONDS,
        )  # fmt: skip


def dependencies(root: Distribution) -> list[Distribution]:
    """The distributions that one needs without extras, and those that they need, as installed here."""
    found: dict[str, Distribution] = {}
    open_ends = [(root, "")]
    while open_ends:
        current, extra = open_ends.pop()
        for requirement in map(Requirement, current.requires or ()):
            if requirement.marker is not None and not requirement.marker.evaluate({"extra": extra}):
                continue
            for wanted in ("", *requirement.extras):
                key = f"{requirement.name.lower()}[{wanted}]"
                if key not in found:
                    found[key] = distribution(requirement.name)
                    open_ends.append((found[key], wanted))
    return list(found.values())
