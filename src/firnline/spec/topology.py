"""Topology files: from `topology.yml`, which names pipeline files, to the options of its members."""

from __future__ import annotations

import contextlib
import functools
import os
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
from firnline.spec.loading import FILE_NAMES, read_text
from firnline.spec.problems import Problem, knows_key, origin_of, problems_of, spec_error, takes_secret
from firnline.spec.tree import parse_yaml

TOPOLOGY_NAMES = ("topology.yml", "topology.yaml")
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
    place = str(path.relative_to(cwd)) if path.is_relative_to(cwd) else str(path)
    if not path.exists():
        raise SpecError(f"{place}: no such file", hint=_HINT, file=place)
    takes = functools.partial(takes_secret, annotation=TopologySpec)
    knows = functools.partial(knows_key, annotation=TopologySpec)
    tree = parse_yaml(read_text(path, place), place=place, environ=environ, takes_secret=takes, knows_key=knows)
    problems = list(tree.problems)
    try:
        spec = TopologySpec.model_validate(tree.data or {}, context={"folder": str(path.parent)})
    except ValidationError as error:
        problems += problems_of(error, tree.origins, TopologySpec)
        raise spec_error(problems, file=place) from None
    if problems:
        raise spec_error(problems, file=place)
    pipelines = []
    for index, word in enumerate(spec.pipelines):
        at = ("pipelines", index)
        try:
            pipelines.append(load_options(word, environ=environ, cwd=path.parent))
        except SpecError as error:
            problems.append(Problem(origin_of(at, tree.origins), at, error.message, error.hint))
    if problems:
        raise spec_error(problems, file=place)
    home = spec.home or os.path.join(path.parent, HOME_FOLDER, spec.name)
    return LoadedTopology(spec.name, path, tuple(pipelines), home, spec.snapshots)
