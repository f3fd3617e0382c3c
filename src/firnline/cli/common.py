"""Shared by all commands: the spec argument, `--json`, `--debug`, the read-only checkpoint store, the decoder."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated

from cyclopts import Parameter
from cyclopts.validators import Number

from firnline.cli.output import Output

if TYPE_CHECKING:
    from firnline.options import PipelineOptions
    from firnline.run.open_pipeline import OpenPipeline
from collections.abc import Callable
from contextlib import closing
from typing import TYPE_CHECKING, TypeVar

from firnline.cli.output import brief, say
from firnline.errors import DamagedError, StoreUnsafeError

if TYPE_CHECKING:
    from firnline.run.open_pipeline import OpenPipeline
    from firnline.stores.base import CheckpointStore
import threading

SPEC_HELP = "The pipeline file, or its folder. [default: firnline.yml here or in a folder above]"
Spec = Annotated[str | None, Parameter(help=SPEC_HELP, show_default=False)]
Flag = Parameter(negative="", show_default=False)
MetricsPort = Annotated[
    int | None,
    Parameter(
        help="Serve /metrics, /healthz and /readyz on this port of 127.0.0.1; 0 means a free port. [default: off]",
        env_var="FIRNLINE_METRICS_PORT",
        validator=Number(gte=0, lte=65535),
    ),
]


@Parameter(name="*")
@dataclass(frozen=True)
class Common:
    """Options of every command."""

    json: Annotated[bool, Flag, Parameter(help="Write the result as JSON.")] = False
    debug: Annotated[bool, Flag, Parameter(help="Show tracebacks and more log lines.")] = False

    @property
    def out(self) -> Output:
        return Output(as_json=self.json)


def load_options(spec: str | None) -> PipelineOptions:
    """Load the options of a spec file, with the overrides `FIRNLINE__A__B` of the environment."""
    from firnline.spec import build

    return build.load_options(spec, environ=os.environ)


def load_pipeline(spec: str | None) -> OpenPipeline:
    """Open a pipeline for a read-only command; reads nothing yet."""
    options = load_options(spec)
    from firnline.run.open_pipeline import open_pipeline

    return open_pipeline(options)


T = TypeVar("T")


def read_with_store(pipeline: OpenPipeline, read: Callable[[CheckpointStore | None], T]) -> T:
    """Call `read` with the checkpoint store, or with None if there is none, it is empty, or it cannot be read."""
    from firnline.history.store import find_store

    try:
        store = find_store(pipeline)
        if store is None:
            return read(None)
        with closing(store):
            return read(store)
    except (OSError, StoreUnsafeError, DamagedError) as error:
        result = read(None)  # raises again if the store was not the cause
        say(f"the checkpoint store cannot be read, so the output comes from the table alone: {brief(str(error))}")
        return result


COLD_SECONDS = 3.0  # loading the decoder takes less; compiling it takes much longer
COLD_MESSAGE = "preparing the decoder, once per installation (up to a minute)"


def warm_decoder(say: Callable[[str], None]) -> None:
    """Compile the decoder, or load it if it is already compiled."""
    timer = threading.Timer(COLD_SECONDS, say, [COLD_MESSAGE])
    timer.daemon = True
    timer.start()
    try:
        from firnline.ndjson import warm_up

        warm_up()
    finally:
        timer.cancel()
