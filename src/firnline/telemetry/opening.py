"""Opens what tells other systems of a run, as the environment asks for it."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from firnline.options import PipelineOptions
from firnline.run.observer import Observer
from firnline.telemetry.lineage import RunLineage, is_lineage_wanted, make_emit
from firnline.telemetry.traces import EpochTraces, are_traces_wanted, find_obstacle, make_provider
from firnline.types import Clock


def open_telemetry(
    options: PipelineOptions, clock: Clock, environ: Mapping[str, str], say: Callable[[str], None]
) -> list[Observer]:
    """Return the observers that the environment asks for. What cannot be opened is said, and holds up no run."""

    def open_traces() -> Observer:
        provider = make_provider()
        return EpochTraces(provider.get_tracer("firnline"), options.name, clock, provider)

    def open_lineage() -> Observer:
        return RunLineage(options, make_emit(), clock, environ)

    found = []
    for what, extra, is_wanted, obstacle, open_it in (
        ("traces are", "otel", are_traces_wanted(environ), find_obstacle(environ), open_traces),
        ("lineage is", "openlineage", is_lineage_wanted(environ), "", open_lineage),
    ):
        if not is_wanted:
            continue
        try:
            if not obstacle:
                found.append(open_it())
        except ImportError:
            obstacle = f"the library is missing; pip install 'firnline[{extra}]'"
        except Exception as error:  # a variable that the library refuses
            obstacle = str(error) or type(error).__name__
        if obstacle:
            say(f"warning: no {what} sent: {obstacle}")
    return found
