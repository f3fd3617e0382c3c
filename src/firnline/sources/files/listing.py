"""Lists the files that a source covers, in byte order of the whole name."""

from __future__ import annotations

import logging
import os
import re
from collections.abc import Iterator
from dataclasses import dataclass

from firnline.storage import FileStat, Storage, is_remote

logger = logging.getLogger(__name__)

_GLOB = re.compile(r"[*?\[]")


@dataclass(frozen=True, slots=True)
class Scope:
    """A folder and, for a glob, the pattern that names below it must match."""

    root: str
    pattern: re.Pattern[str] | None = None

    @classmethod
    def of(cls, path: str) -> Scope:
        """Return the scope of a folder, a single file or a glob; `**` crosses folders, `*` and `?` do not."""
        parts = path.split("/")
        first = next((i for i, part in enumerate(parts) if _GLOB.search(part)), None)
        if first is None and os.path.isfile(path):
            return cls(os.path.dirname(path), re.compile(re.escape(os.path.basename(path))))
        if first is None:
            return cls(path)
        return cls("/".join(parts[:first]), re.compile(_translate("/".join(parts[first:]))))

    def covers(self, name: str) -> bool:
        """Return whether a full name belongs to the source: hidden files and folders (`.x`, `_x`) do not."""
        below = name[len(self.root) :].lstrip("/")
        if any(part.startswith((".", "_")) for part in below.split("/")):
            return False
        return self.pattern is None or self.pattern.fullmatch(below) is not None


def _translate(glob: str) -> str:
    out = []
    at = 0
    while at < len(glob):
        if glob.startswith("**/", at):
            out.append("(?:.*/)?")
            at += 3
        elif glob.startswith("**", at):
            out.append(".*")
            at += 2
        elif glob[at] == "*":
            out.append("[^/]*")
            at += 1
        elif glob[at] == "?":
            out.append("[^/]")
            at += 1
        elif glob[at] == "[" and "]" in glob[at + 2 :]:
            end = glob.index("]", at + 2)
            inner = glob[at + 1 : end].replace("\\", "\\\\")
            out.append("[" + ("^" + inner[1:] if inner[0] == "!" else inner) + "]")
            at = end + 1
        else:
            out.append(re.escape(glob[at]))
            at += 1
    return "".join(out)


def is_gone(root: str) -> bool:
    """Return whether the folder of a source does not exist; an object store has no folders to miss."""
    return not is_remote(root) and not os.path.isdir(root)


def list_files(storage: Storage, scope: Scope, after: str | None = None) -> Iterator[FileStat]:
    """Yield files of the scope after a name; on object stores by start-after paging, so earlier files are not listed
    again."""
    return (stat for stat in storage.list("", after or "") if scope.covers(stat.name) and _is_text(stat.name))


def _is_text(name: str) -> bool:
    """Return whether a name is UTF-8. Any other file is skipped with a warning, because no checkpoint can hold its
    name."""
    try:
        name.encode()
    except UnicodeEncodeError:
        logger.warning("file left alone: its name is not UTF-8", extra={"file": ascii(name)})
        return False
    return True
