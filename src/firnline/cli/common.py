"""What all commands share: the spec argument, `--json` and `--debug`."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated

from cyclopts import Parameter
from cyclopts.validators import Number

from firnline.cli.output import Output

if TYPE_CHECKING:
    from firnline.options import PipelineOptions
    from firnline.run.open_pipeline import Parts

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


def load_parts(spec: str | None) -> Parts:
    """The parts that commands work with that only look; nothing is read yet."""
    options = load_options(spec)
    from firnline.run.open_pipeline import assemble

    return assemble(options)
