"""The kinds of sinks by name. To add one: a folder with a module like `sinks/delta/kind.py`, and its line in `KINDS`.

Kinds of installed packages are known, too (`firnline.kinds`).

Such a module imports the others of its folder on demand, and has four functions:
- `open_sink(options, context) -> Sink`, in the driver;
- `open_stager(target, attempt) -> Stager`, in a worker; `target` comes from `Sink.stage_target`. A kind that is fed
  from the outbox (`sinks.follower`) leaves it out;
- `run_task(task) -> report`, in a worker: what `Sink.commit` handed to `run_tasks`. A task says `kind: commit` and
  `type`, the kind of the sink. A kind whose commits need no tasks leaves it out;
- `config_model() -> type[SinkConfig]`, in the driver: the keys of the kind in a spec. A kind without it is for Python
  only.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

from firnline.errors import ConfigError, FirnlineError
from firnline.kinds import Models, check_kind, load_kind, load_models
from firnline.options import SinkOptions
from firnline.types import Json

if TYPE_CHECKING:  # a spec is read without Arrow
    from firnline.sinks.base import Sink, SinkContext, Stager

PARKED = "parked"  # the type of a target whose rows are parked, and a mark of their files in the ledger
KINDS = {
    "delta": "firnline.sinks.delta.kind",
    "postgres": "firnline.sinks.postgres.kind",
    "redis": "firnline.sinks.redis.kind",
    "kafka": "firnline.sinks.kafka.kind",
    "http": "firnline.sinks.http.kind",
}  # by `type` of the spec: the module, imported when a sink of that kind is opened


def config_models() -> Models:
    """Return the models (`SinkConfig`) of all kinds of sinks that a spec may name, by `type`."""
    return load_models(KINDS, "sink")


def open_sinks(opened: Sequence[tuple[SinkOptions, SinkContext]]) -> tuple[Sink, ...]:
    """Open the sinks of a pipeline, the deciding one first, and check that each has the required capabilities.

    Raises:
        ConfigError: a sink's kind cannot decide, or cannot upsert, and should; or its settings do not fit.
    """
    sinks = []
    for options, context in opened:
        sink = _open_sink(options, context)
        if context.decides and not sink.capabilities.decides:
            raise ConfigError(
                f"sink {sink.name!r} ({options.type}) comes first, and a sink of that kind cannot decide",
                hint="List a sink that can decide first, with required: true, for example a Delta table.",
            )
        if options.write == "upsert" and not sink.capabilities.upserts:
            raise ConfigError(
                f"sink {sink.name!r} ({options.type}) cannot apply changes by key",
                hint="Write `write: append`, or upsert into another sink.",
            )
        sinks.append(sink)
    return tuple(sinks)


def _open_sink(options: SinkOptions, context: SinkContext) -> Sink:
    check_kind(KINDS, "sink", options.type)
    try:
        sink: Sink = load_kind(KINDS, "sink", options.type).open_sink(options, context)
    except (FirnlineError, MemoryError):
        raise
    except Exception as error:
        reason = f"{type(error).__name__}: {error}"
        raise ConfigError(f"sink {options.name!r} ({options.type}) cannot be opened: {reason}") from error
    return sink


def open_stagers(targets: Iterable[dict[str, Json]], attempt: str) -> dict[str, Stager]:
    """Open the stagers for the targets of one port, by sink. Sinks that are fed from the outbox share their files."""
    from firnline.sinks.outbox_rows import OUTBOX, SharedStager

    stagers: dict[str, Stager] = {}
    shared: Stager | None = None
    for target in targets:
        is_shared = target["type"] == OUTBOX
        stager = SharedStager(shared) if is_shared and shared is not None else open_stager(target, attempt)
        shared = shared or stager if is_shared else shared
        stagers[str(target["sink"])] = stager
    return stagers


def close_stagers(stagers: Mapping[str, Stager]) -> dict[str, list[dict[str, Json]]]:
    """Close the stagers of a task; return what each staged. The outbox is written meanwhile, in a thread beside."""
    from firnline.sinks.outbox_rows import OutboxStager, SharedStager

    beside = {sink: stager for sink, stager in stagers.items() if isinstance(stager, OutboxStager | SharedStager)}
    if not beside or len(beside) == len(stagers):
        return {sink: stager.close() for sink, stager in stagers.items()}
    with ThreadPoolExecutor(1, thread_name_prefix="firnline outbox") as pool:
        coming = {sink: pool.submit(stager.close) for sink, stager in beside.items()}
        staged = {sink: stager.close() for sink, stager in stagers.items() if sink not in beside}
        return {sink: coming[sink].result() if sink in coming else staged[sink] for sink in stagers}


def open_stager(target: dict[str, Json], attempt: str) -> Stager:
    """Open the stager for a sink's target, in a worker, behind its guard."""
    from firnline.sinks.guard import GuardedStager
    from firnline.sinks.outbox_rows import OUTBOX, OutboxStager
    from firnline.sinks.parking import ParkingStager

    kind = str(target["type"])
    if kind == OUTBOX:
        return OutboxStager(target, attempt)
    if kind == PARKED:
        return ParkingStager(target, attempt)
    return GuardedStager(target, lambda: load_kind(KINDS, "sink", kind).open_stager(target, attempt))


def run_task(task: dict[str, Json]) -> dict[str, Json]:
    """Perform a task of a sink's commit, in a worker. Raises the errors of the sink's kind."""
    report: dict[str, Json] = load_kind(KINDS, "sink", str(task["type"])).run_task(task)
    return report
