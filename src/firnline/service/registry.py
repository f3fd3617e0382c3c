"""The pipelines that the service knows: the files of a folder, or files by name, read again when they change."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from firnline.errors import ConfigError, FirnlineError
from firnline.options import PipelineOptions
from firnline.spec.build import build_options
from firnline.spec.loading import FILE_NAMES, TOPOLOGY_NAMES, load_spec
from firnline.spec.topology import is_topology

MAX_PIPELINES = 10_000
_SUFFIXES = (".yml", ".yaml")


class UnknownPipelineError(ConfigError):
    """No registered pipeline has this name."""

    code = "unknown_pipeline"


@dataclass(frozen=True, slots=True)
class Registered:
    """One pipeline file: its options, or why it cannot be used.

    `last`: the options of a run that is alive, of a file that cannot be used any more. It can be looked at, paused and
    stopped; nothing is started.
    """

    name: str
    path: Path
    options: PipelineOptions | None = None
    problem: str | None = None
    hint: str = ""  # what helps against the problem; without one, the file is to be edited
    last: PipelineOptions | None = None

    @property
    def reachable(self) -> PipelineOptions | None:
        """The options by which a run can be found; None if there are none."""
        return self.options or self.last

    @property
    def usable(self) -> PipelineOptions:
        """The options; ConfigError, with the problem, if the file cannot be used."""
        if self.options is None:
            raise ConfigError(
                f"pipeline {self.name!r} cannot be used: {self.problem}", hint=self.hint or f"Edit {self.path.name}."
            )
        return self.options


class Registry:
    """The registered pipelines by name, in the order of their names.

    A folder means its own `*.yml` and `*.yaml` files, and a `firnline.yml` in each folder inside it; topology files are
    no pipelines.
    """

    def __init__(self, places: Sequence[str | os.PathLike[str]], environ: Mapping[str, str]) -> None:
        self._places = [Path(os.path.abspath(os.path.expanduser(place))) for place in places]
        self._environ = environ
        self._lock = threading.Lock()
        self._stamps: dict[Path, tuple[int, int, int]] = {}
        self._files: dict[Path, Registered] = {}
        self._by_name: dict[str, Registered] = {}
        self._names: dict[Path, str] = {}  # as the files last said them

    def refresh(self, is_alive: Callable[[str], bool] = lambda _: False) -> None:
        """Find the files, and read those that are new or changed.

        Args:
            is_alive: Whether a run of a pipeline may be alive. It stays registered, with the options that the run has.

        Raises:
            ConfigError: a folder or a named file is missing.
        """
        found = self._find()
        stamps = {path: stamp for path in found if (stamp := _stamp(path)) is not None}
        files = {
            path: self._files[path] if self._stamps.get(path) == stamp and path in self._files else self._load(path)
            for path, stamp in stamps.items()
        }
        by_name = _by_name(files)
        with self._lock:
            former = self._by_name
        for name, one in former.items():
            if one.reachable is not None and is_alive(name):
                by_name[name] = _keep(one, by_name.get(name))
        with self._lock:
            self._stamps, self._files = stamps, files
            self._names = {path: one.name for path, one in files.items() if path in self._names or one.options}
            self._by_name = dict(sorted(by_name.items()))

    def all(self) -> list[Registered]:
        """Return all pipelines, by name."""
        with self._lock:
            return list(self._by_name.values())

    def get(self, name: str) -> Registered:
        """Return the pipeline with this name; UnknownPipelineError if there is none."""
        with self._lock:
            found = self._by_name.get(name)
        if found is None:
            raise UnknownPipelineError("no registered pipeline has this name", hint="GET /api/v1/pipelines lists them.")
        return found

    def _find(self) -> list[Path]:
        found: list[Path] = []
        for place in self._places:
            if place.is_dir():
                entries = sorted(place.iterdir())
                files = [entry for entry in entries if entry.suffix in _SUFFIXES and entry.is_file()]
                found += [entry for entry in files if not is_topology(entry)]
                inner = [entry / name for entry in entries if entry.is_dir() for name in FILE_NAMES]
                found += [path for path in inner if path.is_file()]
            elif place.is_file():
                found += [place] if not is_topology(place) else []
            else:
                raise ConfigError(f"{place}: no such file or folder", hint="Name a folder of pipeline files.")
        if len(found) > MAX_PIPELINES:
            raise ConfigError(f"more than {MAX_PIPELINES:,} pipeline files", hint="Serve them by several services.")
        return list(dict.fromkeys(found))

    def topology_files(self) -> list[Path]:
        """Return the topology files: in the folders of pipeline files, in each folder inside them, or by name."""
        found: list[Path] = []
        for place in self._places:
            entries = sorted(place.iterdir()) if place.is_dir() else [place]
            found += [entry for entry in entries if is_topology(entry) and entry.is_file()]
            inner = [entry / name for entry in entries if entry.is_dir() for name in TOPOLOGY_NAMES]
            found += [path for path in inner if path.is_file()]
        return list(dict.fromkeys(found))

    def _load(self, path: Path) -> Registered:
        try:
            if escape(str(path)) != str(path):
                raise ConfigError(f"{path}: the path is not UTF-8", hint="Rename it.")
            options = build_options(load_spec(path, environ=self._environ), environ=self._environ)
        except FirnlineError as error:
            problem, hint = error.message, error.hint if error.hint != error.default_hint else ""
        except OSError as error:
            problem, hint = f"cannot be read: {error.strerror or error}", "Make it readable."
        else:
            return Registered(options.name, path, options)
        return Registered(
            self._names.get(path) or _fallback_name(path), path, problem=escape(problem), hint=escape(hint)
        )


def _by_name(files: Mapping[Path, Registered]) -> dict[str, Registered]:
    """Return the pipelines by name. A file that cannot be used takes the name from no other."""
    found: dict[str, Registered] = {}
    for path in sorted(files, key=lambda path: (files[path].options is None, path)):
        one = files[path]
        first = found.get(one.name)
        if first is None:
            found[one.name] = one
        elif one.options is not None:
            problem = f"{first.path} and {path} have the same name"
            found[one.name] = replace(first, options=None, problem=problem, hint="")
        else:
            name = escape(path.name)
            name = name if name not in found else escape(str(path)).strip("/").replace("/", ".")
            found[name] = replace(one, name=name)
    return found


def _keep(former: Registered, found: Registered | None) -> Registered:
    """Return what is registered for a pipeline whose run is alive."""
    options = former.reachable
    assert options is not None
    if found is None:
        problem = f"{former.path.name} is gone or names another pipeline, and a run is alive"
        return replace(former, options=None, problem=problem, hint="", last=options)
    if found.options is None:
        return replace(found, last=options)
    if found.options.home.root != options.home.root:
        problem = f"{found.path.name} has another home by now, and a run in the former one is alive: stop it"
        return replace(found, options=None, problem=problem, hint="", last=options)
    return found


def _fallback_name(path: Path) -> str:
    """Return the name of a file that does not say it: its own, or that of its folder."""
    return escape(path.parent.name if path.name in FILE_NAMES else path.stem)


def escape(text: str) -> str:
    """Return a text that UTF-8 can hold: names of files, and texts of specs, may have what it cannot."""
    return text.encode("utf-8", "backslashreplace").decode()


def _stamp(path: Path) -> tuple[int, int, int] | None:
    try:
        found = path.stat()
    except OSError:
        return None
    return found.st_mtime_ns, found.st_size, found.st_ino
