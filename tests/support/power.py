"""A disk whose power fails: records what a process makes durable, and rebuilds every disk that a cut may leave.

Only an fsync makes anything durable: that of a file its bytes, that of a folder its names. `Disk` follows both, by the
calls to `os.fsync` and by looking at the folder itself, so that files written by native code (delta-rs, Arrow, SQLite)
count too. At each of many moments it keeps two images of the folder: what every process sees, and what is durable.
A power cut may leave any mixture of the two (`Moment.cuts`). SQLite's fsyncs are followed by `sqlite_syncs`.
"""

from __future__ import annotations

import os
import random
import shutil
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest import mock

import firnline.storage
from firnline.testing.faults import follow_points
from tests.support.sqlite_syncs import sqlite_syncs

Folder = Mapping[str, int]  # name -> node
Drop = Callable[[str, str], bool]  # the function that asks for an fsync, the path: whether it is left out

_ROOT = 0
_FRESH_NS = 50_000_000  # a file this young may change again without another time stamp
_HELPERS = ("fsync_path", "confirm_path")


@dataclass(frozen=True, slots=True)
class Image:
    """The names of every folder and the bytes of every file, by node."""

    folders: Mapping[int, Folder]
    files: Mapping[int, bytes]


@dataclass(frozen=True, slots=True)
class Cut:
    """A disk after a power cut: bytes by path, None for a folder. `acknowledged` is what had been promised by then."""

    label: str
    paths: Mapping[str, bytes | None]
    acknowledged: Mapping[str, int]

    def restore(self, root: Path) -> None:
        """Make the folder hold exactly this."""
        shutil.rmtree(root, ignore_errors=True)
        root.mkdir(parents=True)
        for path, data in sorted(self.paths.items()):
            if data is None:
                (root / path).mkdir()
            else:
                (root / path).write_bytes(data)


@dataclass(frozen=True, slots=True)
class Moment:
    """What every process saw at one moment, and what of it was durable."""

    label: str
    seen: Image
    durable: Image
    acknowledged: Mapping[str, int]

    def cuts(self, seed: int = 0, subsets: int = 1) -> Iterator[Cut]:
        """The disks that a power cut may leave at this moment; the worst ones first, then random mixtures."""
        names, contents = self._changes()
        yield self._cut("all lost", set(), dict.fromkeys(contents, 0.0))
        yield self._cut("names without bytes", names, dict.fromkeys(contents, 0.0))
        yield self._cut("half of the bytes", names, dict.fromkeys(contents, 0.5))
        for name in sorted(names):
            yield self._cut(f"{name} lost alone", names - {name}, dict.fromkeys(contents, 1.0))
        for node in sorted(contents):
            yield self._cut(f"bytes of {node} lost alone", names, {n: float(n != node) for n in contents})
        rng = random.Random(f"{seed} {self.label} {len(names)} {len(contents)}")
        for _ in range(subsets if names or contents else 0):
            kept = {name for name in sorted(names) if rng.random() < 0.5}
            yield self._cut("a mixture", kept, {node: rng.choice([0.0, 0.5, 1.0]) for node in sorted(contents)})

    def is_durable(self) -> bool:
        """Whether a power cut at this moment takes nothing away."""
        return not any(self._changes())

    def killed(self) -> Cut:
        """The disk as it is when processes are killed and the machine goes on."""
        names, contents = self._changes()
        return self._cut("killed", names, dict.fromkeys(contents, 1.0))

    def _changes(self) -> tuple[set[tuple[int, str]], set[int]]:
        """Names and bytes that are seen and not durable, or durable and not seen any more."""
        names = set()
        for node in {*self.seen.folders, *self.durable.folders}:
            seen, durable = self.seen.folders.get(node, {}), self.durable.folders.get(node, {})
            names |= {(node, name) for name in {*seen, *durable} if seen.get(name) != durable.get(name)}
        return names, {node for node, data in self.seen.files.items() if self.durable.files.get(node) != data}

    def _cut(self, what: str, kept: set[tuple[int, str]], share: Mapping[int, float]) -> Cut:
        """The disk with these changes of names kept, and of new bytes this share."""
        paths: dict[str, bytes | None] = {}

        def walk(node: int, above: str) -> None:
            seen, durable = self.seen.folders.get(node, {}), self.durable.folders.get(node, {})
            for name in {*seen, *durable}:
                child = (seen if (node, name) in kept or seen.get(name) == durable.get(name) else durable).get(name)
                if child is None:
                    continue
                if child in self.seen.folders or child in self.durable.folders:
                    paths[above + name] = None
                    walk(child, f"{above}{name}/")
                else:
                    paths[above + name] = self._bytes(child, share.get(child, 1.0))

        walk(_ROOT, "")
        return Cut(f"{self.label}: {what}", paths, self.acknowledged)

    def _bytes(self, node: int, share: float) -> bytes:
        durable = self.durable.files.get(node, b"")
        seen = self.seen.files.get(node)
        if seen is None or (share < 1.0 and not seen.startswith(durable)):
            return durable
        return seen[: len(durable) + int((len(seen) - len(durable)) * share)]


@dataclass(slots=True)
class Disk:
    """A folder whose writes and fsyncs are followed. `drop` plants bugs: fsyncs that it names never happen."""

    root: Path
    drop: Drop = lambda _caller, _path: False
    moments: list[Moment] = field(default_factory=list)
    acknowledged: Mapping[str, int] = field(default_factory=dict)
    _nodes: dict[int, int] = field(default_factory=dict)  # inode -> node
    _stamps: dict[int, tuple[int, int, int]] = field(default_factory=dict)  # node -> what its bytes were read at
    _seen: Image = Image({_ROOT: {}}, {})
    _durable: Image = Image({_ROOT: {}}, {})
    _next: int = 1
    _lock: Any = field(default_factory=threading.RLock)

    def acknowledge(self, what: str, number: int) -> None:
        """Somebody was told that `number` stands in a sink or a store, with everything below it."""
        with self._lock:
            self.acknowledged = {**self.acknowledged, what: max(number, self.acknowledged.get(what, 0))}
            self._note(f"acknowledged {what} {number}")

    def resume(self, moment: Moment) -> None:
        """Go on after a kill at a moment: everything that was seen is there, and only that is durable that was."""
        killed = moment.killed()
        killed.restore(self.root)
        self.moments.clear()
        self.acknowledged = moment.acknowledged
        self._durable = moment.durable
        self._nodes, self._stamps = {}, {}
        named = [
            child for image in (moment.seen, moment.durable) for f in image.folders.values() for child in f.values()
        ]
        self._next = 1 + max([_ROOT, *named])
        self._adopt(_ROOT, self.root, moment.seen)
        self._seen = moment.seen

    def _adopt(self, node: int, folder: Path, seen: Image) -> None:
        """Give the new inodes of a folder the numbers that their names had."""
        self._nodes[folder.stat().st_ino] = node
        for name, child in seen.folders.get(node, {}).items():
            if child in seen.folders:
                self._adopt(child, folder / name, seen)
            else:
                self._nodes[(folder / name).stat().st_ino] = child

    @contextmanager
    def recording(self) -> Iterator[None]:
        """Follow everything that this process does below the root; nothing is really fsynced meanwhile."""
        self.root.mkdir(parents=True, exist_ok=True)
        forget_process()
        with ExitStack() as stack:
            for name in ("link", "replace", "rename", "unlink", "mkdir"):
                stack.enter_context(mock.patch.object(os, name, self._after(name, getattr(os, name))))
            stack.enter_context(mock.patch.object(os, "fsync", self._fsync))
            stack.enter_context(follow_points(self._at_point))
            stack.enter_context(sqlite_syncs(self._sqlite_synced))
            yield
            with self._lock:
                self._note("ended")

    # -- what happens ---------------------------------------------------------------------------------

    def _after(self, name: str, original: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any, **named: Any) -> Any:
            with self._lock:
                found = original(*arguments, **named)
                paths = [str(a) for a in arguments if str(a).startswith(str(self.root))]
                if paths:
                    self._note(f"{name} {os.path.basename(paths[-1])}")
                return found

        return call

    def _at_point(self, name: str) -> None:
        with self._lock:
            self._note(name)

    def _fsync(self, descriptor: int) -> None:
        path = os.readlink(f"/proc/self/fd/{descriptor}")
        frame = sys._getframe(1)
        while frame.f_code.co_name in _HELPERS and frame.f_back is not None:
            frame = frame.f_back
        if not self.drop(frame.f_code.co_qualname, path):
            with self._lock:
                self._note(f"before fsync of {os.path.basename(path)}")
                self._sync(path)

    def _sqlite_synced(self, path: str) -> None:
        """SQLite makes the names of new journals durable, too."""
        with self._lock:
            self._note(f"before fsync of {os.path.basename(path)}")
            self._sync(path)
            if path.endswith(("-wal", "-journal")):
                self._sync(os.path.dirname(path))

    def _sync(self, path: str) -> None:
        try:
            node = self._nodes.get(os.stat(path).st_ino)
        except FileNotFoundError:
            return
        if node is None or not path.startswith(str(self.root)):
            return
        durable = self._durable
        if node in self._seen.folders:
            self._durable = Image({**durable.folders, node: self._seen.folders[node]}, durable.files)
        else:
            self._durable = Image(durable.folders, {**durable.files, node: self._seen.files[node]})
        self._note(f"fsync of {os.path.basename(path)}")

    def _note(self, label: str) -> None:
        """Look at the folder; keep the moment if anything is new."""
        self._look()
        last = self.moments[-1] if self.moments else None
        if last is None or (last.seen, last.durable, last.acknowledged) != (
            self._seen,
            self._durable,
            self.acknowledged,
        ):
            self.moments.append(Moment(label, self._seen, self._durable, self.acknowledged))

    # -- looking --------------------------------------------------------------------------------------

    def _look(self) -> None:
        folders: dict[int, Folder] = {}
        files: dict[int, bytes] = {}
        found: dict[int, int] = {}
        self._walk(_ROOT, str(self.root), folders, files, found)
        self._nodes = {self.root.stat().st_ino: _ROOT, **found}
        if folders != self._seen.folders or files != self._seen.files:
            self._seen = Image(folders, files)

    def _walk(
        self, node: int, path: str, folders: dict[int, Folder], files: dict[int, bytes], found: dict[int, int]
    ) -> None:
        names: dict[str, int] = {}
        try:
            entries = sorted(os.scandir(path), key=lambda entry: entry.name)
        except FileNotFoundError:
            return
        for entry in entries:
            try:
                child = found.get(entry.inode())
                if child is None:
                    child = self._nodes.get(entry.inode()) or self._new_node()
                    found[entry.inode()] = child
                    if entry.is_dir(follow_symlinks=False):
                        self._walk(child, entry.path, folders, files, found)
                    else:
                        files[child] = self._read(child, entry)
                names[entry.name] = child
            except FileNotFoundError:
                continue  # native code deletes, too
        folders[node] = names

    def _new_node(self) -> int:
        self._next += 1
        return self._next - 1

    def _read(self, node: int, entry: os.DirEntry[str]) -> bytes:
        stat = entry.stat(follow_symlinks=False)
        stamp = (stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns)
        known = self._seen.files.get(node)
        if known is not None and self._stamps.get(node) == stamp and time.time_ns() - stat.st_mtime_ns > _FRESH_NS:
            return known
        data = Path(entry.path).read_bytes()
        self._stamps[node] = stamp
        return known if known == data else data


def forget_process() -> None:
    """What a process remembers of the disk; a new one remembers nothing."""
    firnline.storage._durable_folders.clear()
    firnline.storage._failed.clear()


@contextmanager
def volatile() -> Iterator[None]:
    """Leave every fsync of this process out: a replay only has to be quick."""
    forget_process()
    with mock.patch.object(os, "fsync"):
        yield


def choose(cuts: Iterator[Cut], most: int) -> list[Cut]:
    """Different disks, spread evenly over all of them; of equal ones the last, which was promised most."""
    found = {hash(frozenset(cut.paths.items())): cut for cut in cuts}
    every = list(found.values())
    step = max(1.0, len(every) / most)
    return [every[int(number * step)] for number in range(min(most, len(every)))]
