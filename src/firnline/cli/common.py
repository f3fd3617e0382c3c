"""What all commands share: the spec argument, `--json`, `--debug`, the checkpoint store read-only, the warm decoder."""

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
        help="Serve /metrics, /healthz and /readyz on this port of 127.0.0.1; 0 takes a free one. [default: off]",
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
    """The options of a spec file, with `FIRNLINE__A__B` of the environment applied."""
    from firnline.spec import build

    return build.load_options(spec, environ=os.environ)


def load_pipeline(spec: str | None) -> OpenPipeline:
    """Open a pipeline for a read-only command; reads nothing yet."""
    options = load_options(spec)
    from firnline.run.open_pipeline import open_pipeline

    return open_pipeline(options)


T = TypeVar("T")


def look(pipeline: OpenPipeline, work: Callable[[CheckpointStore | None], T]) -> T:
    """Do it with the store, or with None where there is none, nothing was ever put, or it cannot be read."""
    from firnline.history.store import find_store

    try:
        store = find_store(pipeline)
        if store is None:
            return work(None)
        with closing(store):
            return work(store)
    except (OSError, StoreUnsafeError, DamagedError) as error:
        found = work(None)  # raises again if it was not the store's fault
        say(f"the checkpoint store cannot be read, so only what the table tells is shown: {brief(str(error))}")
        return found


COLD_SECONDS = 3.0  # loading the decoder takes less; compiling it takes much longer
COLD_MESSAGE = "preparing the decoder, once per installation (up to a minute)"


def warm_decoder(say: Callable[[str], None]) -> None:
    """Compile the decoder, or load it where it is compiled already."""
    timer = threading.Timer(COLD_SECONDS, say, [COLD_MESSAGE])
    timer.daemon = True
    timer.start()
    try:
        from firnline.ndjson import warm_up

        warm_up()
    finally:
        timer.cancel()
