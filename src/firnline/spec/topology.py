"""Topology files: from `topology.yml`, which names pipeline files, to the options of its members."""

from __future__ import annotations

import contextlib
import difflib
import functools
import os
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Annotated

from pydantic import BeforeValidator, Field, ValidationError

from firnline.config import Config, Count, Duration, Flag, Location, Name, fail
from firnline.config.units import parse_seconds, parse_size
from firnline.errors import SpecError
from firnline.options import PipelineOptions
from firnline.spec.build import HOME_FOLDER, load_options
from firnline.spec.loading import FILE_NAMES, TOPOLOGY_NAMES, find_spec, read_text
from firnline.spec.problems import CHECK_HINT, Problem, knows_key, origin_of, problems_of, spec_error, takes_secret
from firnline.spec.tree import parse_yaml

_HINT = f"Write {TOPOLOGY_NAMES[0]} with `name` and `pipelines`, or name the pipeline files."


def _hold(value: object) -> object:
    """Return a limit of time or of bytes, as it is written: 7d, 50GB."""
    text = str(value)
    if not text.isdecimal():  # a number alone could be either
        with contextlib.suppress(ValueError):
            return timedelta(seconds=parse_seconds(text))
        with contextlib.suppress(ValueError):
            return parse_size(text)
    raise fail(f'must be a time like 7d or a size like 50GB, not "{text}"')


class SnapshotSpec(Config):
    """How `firnline topology snapshot` takes snapshots; its flags come first."""

    every: Duration | None = Field(default=None, description="Take one after the other, at this interval.")
    keep: Count = Field(default=3, description="Keep this many completed snapshots; drop older ones.")
    timeout: Duration = Field(default=timedelta(minutes=10), description="Abort a snapshot after this time.")
    include_stopped: Flag = Field(default=False, description="Record members that have no run, too.")
    max_hold: Annotated[timedelta | int | None, BeforeValidator(_hold)] = Field(
        default=None,
        description="Drop a snapshot after this time (7d), or the oldest ones while files that only snapshots need "
        "have more than this size (50GB).",
    )
    copies: Flag = Field(
        default=False,
        alias="copy",
        description="Also copy each snapshot into the home, as a savepoint of the topology; it is deleted with it.",
    )


class TopologySpec(Config):
    """A topology: pipelines that read what others write."""

    name: Name = Field(description="The name of the topology.")
    pipelines: tuple[str, ...] = Field(
        min_length=1, description="The pipeline files, or their folders, relative to this file."
    )
    home: Location | None = Field(
        default=None,
        description="Folder or URI of its snapshots' records; relative to this file, default: data/NAME beside it. "
        "Members read it with the storage options of their own homes.",
    )
    snapshots: SnapshotSpec = Field(default=SnapshotSpec(), description="How snapshots are taken.")


@dataclass(frozen=True, slots=True)
class LoadedTopology:
    """The pipelines of a topology, and the file that names them; without a file, the command line named them."""

    name: str
    path: Path | None
    pipelines: tuple[PipelineOptions, ...]
    home: str = ""
    files: Mapping[str, str] = field(default_factory=dict)  # the file of each pipeline, as the user can type it
    snapshots: SnapshotSpec = field(default_factory=SnapshotSpec)


def load_topology(
    words: Sequence[str], *, environ: Mapping[str, str], cwd: str | os.PathLike[str] | None = None
) -> LoadedTopology:
    """Load a topology file or, if `words` name them, pipeline files; without words, the topology file of the folder.

    Raises:
        SpecError: a file is missing, or wrong.
    """
    folder = Path(os.path.abspath(cwd or os.getcwd()))
    files = [Path(os.path.abspath(folder / os.path.expanduser(word))) for word in words] or [folder]
    if len(files) == 1 and (path := _find_topology(files[0])) is not None:
        return _load(path, environ, folder)
    if not words:
        raise SpecError(f"no {TOPOLOGY_NAMES[0]} in {folder}", hint=_HINT)
    pipelines = tuple(load_options(path, environ=environ, cwd=folder) for path in files)
    return LoadedTopology("", None, pipelines)


def is_topology(path: Path) -> bool:
    """Return whether a file is a topology file, by its name."""
    return path.name.endswith(TOPOLOGY_NAMES)


def _find_topology(path: Path) -> Path | None:
    """Return the topology file that a word names: by the name of the file, or a folder that holds one."""
    if path.is_dir():
        found = [path / name for name in TOPOLOGY_NAMES if (path / name).is_file()]
        if len(found) > 1:
            raise SpecError(f"{path} holds both {' and '.join(TOPOLOGY_NAMES)}", hint="Delete or rename one.")
        is_pipeline = any((path / name).is_file() for name in FILE_NAMES)
        return found[0] if found and not is_pipeline else None
    return path if is_topology(path) else None


def _load(path: Path, environ: Mapping[str, str], cwd: Path) -> LoadedTopology:
    place = _display(path, cwd)
    if not path.exists():
        raise SpecError(f"{place}: no such file", hint=_HINT, file=place)
    check = f"Correct it and try again: {shlex.join(['firnline', 'topology', 'show', place])}"
    takes = functools.partial(takes_secret, annotation=TopologySpec)
    knows = functools.partial(knows_key, annotation=TopologySpec)
    try:
        text = read_text(path, place)
    except SpecError as error:
        error.hint = check if error.hint == CHECK_HINT else error.hint
        raise
    tree = parse_yaml(text, place=place, environ=environ, takes_secret=takes, knows_key=knows)
    problems = list(tree.problems)
    try:
        spec = TopologySpec.model_validate(tree.data or {}, context={"folder": str(path.parent)})
    except ValidationError as error:
        problems += problems_of(error, tree.origins, TopologySpec)
        raise spec_error(problems, file=place, hint=check) from None
    if problems:
        raise spec_error(problems, file=place, hint=check)
    pipelines: dict[str, PipelineOptions] = {}
    files: dict[str, str] = {}
    for index, word in enumerate(spec.pipelines):
        at = ("pipelines", index)
        try:
            file = _find_pipeline(word, path)
            options = load_options(file, environ=environ, cwd=path.parent)
        except SpecError as error:
            hint = check if error.hint == CHECK_HINT else error.hint
            problems.append(Problem(origin_of(at, tree.origins), at, error.message, hint))
            continue
        shown = _display(file, cwd)
        if options.name in pipelines:
            words, hint = _name_twice(options.name, files[options.name], shown)
            problems.append(Problem(origin_of(at, tree.origins), at, words, hint))
            continue
        pipelines[options.name], files[options.name] = options, shown
    if problems:
        raise spec_error(problems, file=place, hint=check)
    home = spec.home or os.path.join(path.parent, HOME_FOLDER, spec.name)
    return LoadedTopology(spec.name, path, tuple(pipelines.values()), home, files, spec.snapshots)


def _display(file: Path, cwd: Path) -> str:
    return str(file.relative_to(cwd)) if file.is_relative_to(cwd) else str(file)


def _find_pipeline(word: str, topology: Path) -> Path:
    """Return the pipeline file that a topology file names. Raises SpecError, with the file that was probably meant."""
    given = Path(os.path.abspath(topology.parent / os.path.expanduser(word)))
    if not given.is_dir() and is_topology(given):
        raise SpecError(
            f"{word} is a topology file, not a pipeline file",
            hint="List the pipeline files of that topology instead: a topology has no topologies as members.",
        )
    if not given.exists():
        names = sorted(one.name for one in given.parent.glob("*.y*ml") if not is_topology(one)) if word else []
        close = difflib.get_close_matches(given.name, names, n=1, cutoff=0.6)
        meant = f' (did you mean "{os.path.join(os.path.dirname(word), close[0])}"?)' if close else ""
        raise SpecError(
            f"{word}: no such file{meant}",
            hint=f"Write a pipeline file or its folder, relative to {topology.parent}.",
        )
    return find_spec(word, cwd=topology.parent)


def _name_twice(name: str, first: str, second: str) -> tuple[str, str]:
    """Return what is wrong with two entries of one name, and what to do."""
    if first == second:
        return f"{second} is listed twice", "Delete one of the two entries."
    return (
        f"{second} has the name {name!r}, as {first} has",
        f"A name is the identity of a pipeline: write another `name` in {second}, if it has not run yet, or list one.",
    )
