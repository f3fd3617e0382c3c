"""A folder on the module path that holds an installed package, as pip leaves it."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path


def install(folder: Path, name: str, entry_points: Mapping[str, Mapping[str, str]], **modules: str) -> Path:
    """Put a package into a folder: its modules (name -> text) and what it registers (group -> name -> module)."""
    info = folder / f"{name.replace('-', '_')}-1.0.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
    groups = (
        f"[{group}]\n" + "".join(f"{kind} = {module}\n" for kind, module in kinds.items())
        for group, kinds in entry_points.items()
    )
    (info / "entry_points.txt").write_text("\n".join(groups))
    for module, text in modules.items():
        (folder / f"{module}.py").write_text(text)
    return folder
