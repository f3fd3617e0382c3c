"""Where an installation keeps what it compiled: beside the package, for all users, or in the user's own cache.

Compiled code runs unchecked. Files are therefore used only if their owner is root, this user or the owner of the
package, and if not everybody may write them or their folder.
"""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

PACKAGE = Path(__file__).parent


def user_cache() -> Path:
    """Return the folder for what this user compiles; it may not exist."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path("~/.cache").expanduser()) / "firnline"


def is_trusted(path: Path) -> bool:
    """Return whether a file exists, and only its rightful owner (or their group) may change it."""
    owners = {0, os.geteuid(), PACKAGE.stat().st_uid}
    try:
        facts = [path.stat(), path.parent.stat()]
    except OSError:
        return False
    return all(fact.st_uid in owners and not fact.st_mode & 0o002 for fact in facts)


def find_trusted(name: str, beside: Path) -> Path | None:
    """Return a compiled file: from the folder in the package or, without it, from the user's cache."""
    for folder in (beside, user_cache()):
        if is_trusted(folder / name):
            return folder / name
    return None


def ensure_folder(beside: Path) -> Path | None:
    """Return the folder to compile into: `beside` if this user may write there, else the user's cache, else None."""
    for folder in (beside, user_cache()):
        try:
            folder.mkdir(mode=0o755, parents=True, exist_ok=True)
            if folder.stat().st_mode & 0o002:
                continue
            tempfile.TemporaryFile(dir=folder).close()
        except OSError:
            continue
        return folder
    return None
