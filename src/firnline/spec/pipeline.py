"""A pipeline from Python: the same models as the spec file, run in this process."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from firnline.engine.observer import Observer
from firnline.engine.parts import assemble
from firnline.engine.runner import Runner, RunResult
from firnline.engine.spark import SparkEngine
from firnline.history.status import PipelineStatus, load_status
from firnline.ndjson import warm_up
from firnline.options import PipelineOptions
from firnline.spec.build import build_options, load_options
from firnline.spec.loading import parse_spec


class Pipeline:
    """One pipeline.

    Takes the keys of a spec file as keyword arguments; relative paths are resolved against the current folder::

        pipeline = firnline.Pipeline(
            name="flights",
            sources={"flights": {"type": "files", "path": "in"}},
            sinks=[{"type": "delta", "table": "out"}],
        )
        result = pipeline.run(once=True)
    """

    def __init__(self, **spec: Any) -> None:
        loaded = parse_spec(spec, folder=Path.cwd())
        self.options: PipelineOptions = build_options(loaded, environ=os.environ)

    @classmethod
    def load(cls, path: str | Path | None = None, environ: Mapping[str, str] | None = None) -> Pipeline:
        """A pipeline from a spec file; without a path, `firnline.yml` of this folder or one above it."""
        found = cls.__new__(cls)
        found.options = load_options(path, environ=os.environ if environ is None else environ)
        return found

    def run(self, *, once: bool = False, observer: Observer | None = None) -> RunResult:
        """Run until stopped or, with `once`, until the input is exhausted.

        Raises:
            FirnlineError: the run failed; what was committed stays, and running again is safe when
                `error.retryable`.
        """
        engine = SparkEngine(self.options.name, self.options.spark, prepare=warm_up)
        try:
            result = Runner(assemble(self.options, once=once), engine, observer, once=once).run()
        finally:
            engine.stop()
        if result.error is not None:
            raise result.error
        return result

    def status(self) -> PipelineStatus:
        """Where the pipeline stands; starts no JVM."""
        return load_status(assemble(self.options))
