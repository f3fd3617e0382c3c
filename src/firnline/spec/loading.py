"""Finds a pipeline file, reads it, and reports everything that is wrong with it at once."""

from __future__ import annotations

import functools
import os
import shlex
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from firnline.errors import SpecError
from firnline.spec.checks import check_graph, query_problems
from firnline.spec.models import PipelineSpec, pipeline_model
from firnline.spec.problems import (
    KeyPath,
    Origin,
    Problem,
    knows_key,
    origin_of,
    problems_of,
    spec_error,
    takes_secret,
)
from firnline.spec.tree import Tree, apply_overrides, parse_yaml

FILE_NAMES = ("firnline.yml", "firnline.yaml")
TOPOLOGY_NAMES = ("topology.yml", "topology.yaml")  # what the name of a topology file ends with
MAX_SPEC_BYTES = 1024 * 1024
_INIT_HINT = "`firnline init` writes one; or name the file."


@dataclass(frozen=True, slots=True)
class LoadedSpec:
    """A valid spec and where it came from.

    Attributes:
        spec: The validated model; local paths in it are absolute.
        folder: What relative paths, those of secret files too, start at.
        path: The file, or None when the spec was made in Python.
        origins: Where each key was written, for messages about values that fail later.
        warnings: One line for each secret that is written in the file itself; never the secret.
    """

    spec: PipelineSpec
    folder: Path
    path: Path | None = None
    origins: Mapping[KeyPath, Origin] = field(default_factory=dict, repr=False)
    warnings: tuple[str, ...] = ()


def find_spec(path: str | os.PathLike[str] | None = None, *, cwd: str | os.PathLike[str] | None = None) -> Path:
    """Return the pipeline file: the given one, or the nearest from `cwd` (the current folder) upwards.

    Args:
        path: A file, or a folder that holds `firnline.yml` or `firnline.yaml`.
        cwd: Where the search starts, and what a relative `path` is relative to.

    Raises:
        SpecError: there is none, or one folder holds both names.
    """
    start = Path(os.path.abspath(cwd or os.getcwd()))
    if path is None:
        for folder in (start, *start.parents):
            found = _find_in(folder)
            if found is not None:
                return found
        raise SpecError(f"no {FILE_NAMES[0]} in {start} or the folders above it", hint=_INIT_HINT)
    given = Path(os.path.abspath(start / os.path.expanduser(path)))
    if given.is_dir():
        found = _find_in(given)
        if found is None:
            raise SpecError(f"no {FILE_NAMES[0]} in {given}", hint=_INIT_HINT)
        return found
    if not given.exists():
        raise SpecError(f"{os.fspath(path)}: no such file", hint=_INIT_HINT, file=str(given))
    return given


def _find_in(folder: Path) -> Path | None:
    found = [folder / name for name in FILE_NAMES if (folder / name).is_file()]
    if len(found) > 1:
        raise SpecError(
            f"{folder} holds both {FILE_NAMES[0]} and {FILE_NAMES[1]}", hint="Delete or rename one, or name the file."
        )
    return found[0] if found else None


def load_spec(
    path: str | os.PathLike[str] | None = None,
    *,
    environ: Mapping[str, str],
    cwd: str | os.PathLike[str] | None = None,
) -> LoadedSpec:
    """Find, read and check a pipeline file; `FIRNLINE__A__B` in `environ` overrides its keys.

    Args:
        path: A file or folder; by default the file is looked for as in `find_spec`.
        environ: Where variables are looked up; callers at the edge pass `os.environ`.
        cwd: Where the search starts.

    Raises:
        SpecError: names file, line and key path of every problem.
    """
    file = find_spec(path, cwd=cwd)
    place = _display(file, Path(os.path.abspath(cwd or os.getcwd())))
    takes = functools.partial(takes_secret, annotation=pipeline_model())
    knows = functools.partial(knows_key, annotation=pipeline_model())
    tree = parse_yaml(read_text(file, place), place=place, environ=environ, takes_secret=takes, knows_key=knows)
    apply_overrides(tree, environ, takes)
    spec = _validate(tree, folder=file.parent, place=place)
    return LoadedSpec(spec, file.parent, file, tree.origins, tuple(_warnings(tree)))


def _warnings(tree: Tree) -> Iterator[str]:
    words = "holds a secret in plain text; write ${env:NAME} or ${file:path} instead"
    for path in tree.inline_secrets:
        yield str(Problem(origin_of(path, tree.origins), path, words))


def parse_spec(
    data: Mapping[str, Any], *, folder: str | os.PathLike[str] | None = None, place: str = "spec"
) -> LoadedSpec:
    """Check a spec that is already a mapping, e.g. one made in Python; no variables, no overrides.

    Raises:
        SpecError: names `place` and key path of every problem.
    """
    base = Path(os.path.abspath(folder or os.getcwd()))
    tree = Tree(dict(data), {(): Origin(place)})
    return LoadedSpec(_validate(tree, folder=base, place=place), base, None, tree.origins)


def _display(file: Path, cwd: Path) -> str:
    return str(file.relative_to(cwd)) if file.is_relative_to(cwd) else str(file)


def read_text(file: Path, place: str) -> str:
    """Return the text of a file that somebody wrote. Raises SpecError if it cannot be read, or is no such file."""
    try:
        with file.open("rb") as stream:
            content = stream.read(MAX_SPEC_BYTES + 1)
    except OSError as exc:
        raise SpecError(f"{place}: cannot be read: {exc.strerror or exc}", file=place) from None
    if len(content) > MAX_SPEC_BYTES:
        raise SpecError(f"{place}: larger than {MAX_SPEC_BYTES} bytes; this is not a pipeline file", file=place)
    try:
        return content.decode("utf-8-sig")
    except UnicodeDecodeError as exc:
        line = content.count(b"\n", 0, exc.start) + 1
        raise spec_error([Problem(Origin(place, line), (), "not UTF-8 text")], file=place) from None


def _topology_error(place: str) -> SpecError:
    """Return the error about a topology file where a pipeline file is needed, or that does not have its name."""
    show = ["firnline", "topology", "show"]
    if place.endswith(TOPOLOGY_NAMES):
        words, hint = "it lists pipelines, so it is a topology file, not a pipeline file", shlex.join([*show, place])
    else:
        stem, ending = os.path.splitext(place)
        renamed = f"{stem}-topology{ending if ending in ('.yml', '.yaml') else '.yml'}"
        words = f"it lists pipelines, as a topology file does, but its name does not end with {TOPOLOGY_NAMES[0]}"
        hint = f"Rename it: {shlex.join(['mv', place, renamed])} && {shlex.join([*show, renamed])}"
    return spec_error([Problem(Origin(place), (), words, hint)], file=place)


def _validate(tree: Tree, *, folder: Path, place: str) -> PipelineSpec:
    if tree.data is None and not tree.problems:
        raise spec_error(
            [Problem(Origin(place), (), "the file is empty", "`firnline init` writes a spec.")], file=place
        )
    if not isinstance(tree.data, dict):
        if not tree.problems:
            tree.problems.append(Problem(Origin(place, 1), (), "must be a mapping that starts with `name: ...`"))
        raise spec_error(tree.problems, file=place)
    if "pipelines" in tree.data and not tree.data.keys() & {"sources", "sinks"}:
        raise _topology_error(place)
    spec: PipelineSpec | None = None
    problems = list(tree.problems)
    model = pipeline_model()
    try:
        spec = model.model_validate(tree.data, context={"folder": str(folder)})
    except ValidationError as exc:
        # A value that could not be read is reported once, not again for its placeholder.
        reported = {problem.path for problem in tree.problems}
        problems += [p for p in problems_of(exc, tree.origins, model) if p.path not in reported]
    if spec is not None:
        problems += [Problem(origin_of(at, tree.origins), at, words, hint) for at, words, hint in check_graph(spec)]
        problems += query_problems(spec, tree.origins)
    if problems or spec is None:
        raise spec_error(problems, file=place)
    return spec
