"""Requests about files: read one that was set aside again, give some up, read a finished one again.

Each is planned first. What is performed is what was planned: a file that came meanwhile is not touched, and one that is
asked for already, or that an epoch has dealt with, is passed over. So a request that is repeated changes nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase

from firnline.errors import ConfigError
from firnline.history.reread import RereadPlan
from firnline.history.store import on_record
from firnline.run.open_pipeline import OpenPipeline
from firnline.storage import is_remote, normalise
from firnline.types import Json

NAMED = 100  # paths in the audit record


@dataclass(frozen=True, slots=True)
class DropPlan:
    """The files to give up, with the reasons why they were set aside."""

    patterns: tuple[str, ...]
    files: dict[str, str]

    def rows(self) -> list[dict[str, Json]]:
        return [{"path": path, "reason": reason} for path, reason in self.files.items()]


def load_set_aside(pipeline: OpenPipeline) -> dict[str, str]:
    """Load the files that are set aside, with their reasons."""
    head = pipeline.load()
    positions = head.checkpoint.positions if head.checkpoint else {}
    described = pipeline.sources.describe(positions).values()
    return {path: reason for position in described for path, reason in position.set_aside.items()}


def find_set_aside(pipeline: OpenPipeline, path: str) -> str:
    """Find the full name of a file that is set aside; the path may be relative to the source or to this folder.

    Raises:
        ConfigError: no file of this name is set aside.
    """
    aside = load_set_aside(pipeline)
    names = [path, *(f"{source.location}/{path}" for source in pipeline.sources)]
    if not is_remote(path):
        names.append(normalise(path))
    for name in names:
        if name in aside:
            return name
    raise ConfigError(f"{path} is not set aside", hint="firnline files --status set_aside", unknown="file")


def is_retry_asked(pipeline: OpenPipeline, path: str, *, changed: bool) -> bool:
    """Whether another read of a file that was set aside is asked for already."""
    return any(r.kind == "retry" and r.path == path and r.changed == changed for r in pipeline.requests.load())


def ask_retry(pipeline: OpenPipeline, path: str, run: str, *, changed: bool) -> bool:
    """Ask the next epoch to read a file that was set aside, by its full name. False if it was asked already."""
    is_new = not is_retry_asked(pipeline, path, changed=changed)
    epoch, details = pipeline.load().epoch, {"path": path, "changed": changed}
    with on_record(pipeline, "files-retry", run, from_epoch=epoch, to_epoch=None, **details) as found:
        found["asked"] = int(is_new)
        if is_new:
            pipeline.requests.ask_retry(path, changed=changed, ids=pipeline.ids)
    return is_new


def plan_drop(pipeline: OpenPipeline, patterns: Sequence[str]) -> DropPlan:
    """Return the files that names or patterns choose among those that are set aside.

    Raises:
        ConfigError: one of them chooses none.
    """
    aside = load_set_aside(pipeline)
    chosen: dict[str, str] = {}
    for pattern in patterns:
        fits = [path for path in aside if fnmatchcase(path, pattern)] or [find_set_aside(pipeline, pattern)]
        chosen |= {path: aside[path] for path in sorted(fits)}
    return DropPlan(tuple(patterns), chosen)


def ask_drop(pipeline: OpenPipeline, plan: DropPlan, run: str) -> int:
    """Ask the next epoch to give up the files of a plan. Returns how many were asked for now."""
    asked = {request.path for request in pipeline.requests.load() if request.kind == "drop"}
    missing = [path for path in plan.files if path not in asked and path in load_set_aside(pipeline)]
    facts: dict[str, Json] = {"files": len(plan.files), "patterns": list(plan.patterns)}
    facts["paths"] = list(plan.files)[:NAMED]
    with on_record(pipeline, "files-drop", run, from_epoch=pipeline.load().epoch, to_epoch=None, **facts) as found:
        found["asked"] = len(missing)
        for path in missing:
            pipeline.requests.ask_drop(path, ids=pipeline.ids)
    return len(missing)


def ask_reread(pipeline: OpenPipeline, plan: RereadPlan, run: str) -> bool:
    """Ask the next epoch to read a finished file again. False if it was asked already.

    The request applies while the reading that the plan names is the newest one of the file.
    """
    waiting = pipeline.requests.load()
    is_new = not any(r.kind == "reread" and (r.path, r.source) == (plan.path, plan.source) for r in waiting)
    details: dict[str, Json] = {"path": plan.path, "source": plan.source, "records": plan.records}
    details["reading"] = plan.reading
    epoch = pipeline.load().epoch
    with on_record(pipeline, "files-reread", run, from_epoch=epoch, to_epoch=None, **details) as found:
        found["asked"] = int(is_new)
        if is_new:
            pipeline.requests.ask_reread(plan.path, plan.source, reading=plan.reading, ids=pipeline.ids)
    return is_new
