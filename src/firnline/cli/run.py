"""`firnline run`: runs the pipeline in this process, on Spark, until stopped or once."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Annotated, Any

from cyclopts import App, Parameter

from firnline.cli.common import Common, Flag, MetricsPort, Spec, load_options
from firnline.cli.output import count_text, print_failure, time_text
from firnline.errors import ConfigError, FirnlineError

if TYPE_CHECKING:
    from firnline.cli.narrator import Tally
    from firnline.engine.observer import Observer
    from firnline.engine.runner import RunResult
    from firnline.options import PipelineOptions

EPILOGUE = """\
Progress goes to stderr: a live display on a terminal, dated lines otherwise.
The first SIGINT or SIGTERM stops cleanly after the epochs in flight, a second
one at once (exit code 130); both are safe, as is kill -9. Running again
resumes where the table says it stood.

Output (stdout; JSON fields):
  pipeline, run, status (done, stopped, failed, fenced), exit_code, epoch,
  generation, epochs, files, records, rows, bytes_read, quarantined (by
  reason), late_files, set_aside, restarts, seconds, error

Exit codes:
  0 done or stopped, 1 failed, 2 usage or spec, 3 failed but safe to run
  again, 4 outcome unknown, 5 fenced by another run, 130 stopped at once

Environment:
  FIRNLINE_METRICS_PORT  --metrics-port
  FIRNLINE__A__B         overrides the key a.b of the spec
  NO_COLOR               no colours

Examples:
  firnline run --once
  firnline run flights/firnline.yml --metrics-port 9464
"""

app = App(name="run", help_epilogue=EPILOGUE)


@app.default
def run(
    spec: Spec = None,
    /,
    *,
    once: Annotated[bool, Flag, Parameter(help="End when the input is exhausted.")] = False,
    accept_duplicates: Annotated[
        bool,
        Flag,
        Parameter(help="Fall back to an older progress of another tool when its newest is damaged; may double rows."),
    ] = False,
    source_moved: Annotated[
        str | None, Parameter(help="OLD=NEW: the same files now lie elsewhere. [default: none]")
    ] = None,
    metrics_port: MetricsPort = None,
    common: Common = Common(),
) -> int:
    """Run the pipeline until stopped, or once."""
    options = load_options(spec)
    moved = _moved(source_moved)
    result, tally, asked = _run(
        options, once=once, accept_duplicates=accept_duplicates, moved=moved, port=metrics_port, debug=common.debug
    )
    if common.json:
        common.out.json(_as_json(options, result, tally, asked=asked))
    elif result.exit_code == 0:
        common.out.line(_last_line(tally, asked=asked))
    if result.exit_code:
        error = result.error or FirnlineError(f"the run ended with exit code {result.exit_code}")
        print_failure(error, debug=common.debug)
    return result.exit_code


def _moved(text: str | None) -> tuple[str, str] | None:
    if text is None:
        return None
    old, equals, new = text.partition("=")
    if not (old and equals and new):
        raise ConfigError(f"--source-moved {text}: not OLD=NEW", hint="firnline run --source-moved /old/in=/new/in")
    return old, new


def _run(
    options: PipelineOptions, *, once: bool, accept_duplicates: bool, moved: tuple[str, str] | None,
    port: int | None, debug: bool,
) -> tuple[RunResult, Tally, bool]:  # fmt: skip
    from firnline.cli.narrator import Narrator, Tally
    from firnline.cli.progress import logging_to, open_display
    from firnline.cli.signals import stop_on_signals
    from firnline.cli.warming import warm_decoder
    from firnline.engine.observer import Observers
    from firnline.engine.parts import assemble
    from firnline.engine.runner import Runner
    from firnline.engine.spark import SparkEngine

    tally = Tally(time.monotonic)
    with contextlib.ExitStack() as stack:
        display = stack.enter_context(open_display(tally))
        stack.enter_context(logging_to(display, debug=debug))
        watchers = stack.enter_context(_watchers(options, port, display.say))
        narrator = Narrator(display.say, attempts=options.restart.attempts)
        engine = SparkEngine(options.name, options.spark, prepare=lambda: warm_decoder(display.say))
        stack.callback(engine.stop)
        runner = Runner(
            assemble(options, once=once, moved=moved),
            engine,
            Observers(tally, narrator, *watchers),
            once=once,
            accept_duplicates=accept_duplicates,
        )
        signals = stack.enter_context(stop_on_signals(runner.stop, display.stopping, display.restore))
        return runner.run(), tally, signals.asked


@contextlib.contextmanager
def _watchers(options: PipelineOptions, port: int | None, say: Callable[[str], None]) -> Iterator[list[Observer]]:
    """Metrics and health, served while the run lasts; none without a port."""
    if port is None:
        yield []
        return
    from firnline.service.endpoints import HOST, Endpoints
    from firnline.service.health import Health
    from firnline.service.metrics import PipelineMetrics

    metrics = PipelineMetrics(options.name, time.monotonic)
    health = Health(options.name, time.monotonic, poll_seconds=options.source.poll_interval_secs)
    with Endpoints(metrics.registry(), health, port) as served:
        say(f"metrics on http://{HOST}:{served.port}/metrics")
        yield [metrics, health]


def _last_line(tally: Tally, *, asked: bool) -> str:
    if asked:
        return f"stopped cleanly after epoch {tally.epoch}"
    if not tally.epochs:
        return f"nothing to do; the table stands at epoch {tally.epoch}"
    parts = [f"done after epoch {tally.epoch}: {count_text(tally.rows, 'row')} from {count_text(tally.files, 'file')}"]
    if tally.quarantined:
        parts.append(f"{tally.quarantined.total():,} quarantined")
    if tally.set_aside:
        parts.append(f"{count_text(tally.set_aside, 'file')} set aside")
    return ", ".join([*parts, time_text(tally.seconds)])


def _as_json(options: PipelineOptions, result: RunResult, tally: Tally, *, asked: bool) -> dict[str, Any]:
    status = {0: "stopped" if asked else "done", 5: "fenced"}.get(result.exit_code, "failed")
    error = result.error
    return {
        "pipeline": options.name,
        "run": result.run,
        "status": status,
        "exit_code": result.exit_code,
        **tally.summary(),
        "error": {"code": error.code, "message": error.message, "hint": error.hint} if error else None,
    }
