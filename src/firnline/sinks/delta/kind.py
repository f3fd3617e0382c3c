"""The kind `delta`: Delta tables that are appended to, upserted, or written in two stages.

Modules are imported on demand: a worker stages files without loading the modules of a commit or of a spec.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from firnline.sinks.delta.options import DeltaPartsOptions, JournalOptions
from firnline.types import Json

if TYPE_CHECKING:
    from firnline.sinks.base import Sink, SinkContext, Stager
    from firnline.sinks.delta.config import DeltaSinkConfig
    from firnline.sinks.delta.options import DeltaSinkOptions


def config_model() -> type[DeltaSinkConfig]:
    """Return the model of a table's keys in a spec."""
    from firnline.sinks.delta.config import DeltaSinkConfig

    return DeltaSinkConfig


def open_sink(options: DeltaSinkOptions | DeltaPartsOptions, context: SinkContext) -> Sink:
    """Open a table. Reads and writes nothing yet.

    Raises:
        ConfigError: an upsert has no key, neither in the spec nor from its input.
    """
    if isinstance(options, DeltaPartsOptions):
        from firnline.sinks.delta.parts.sink import DeltaPartsSink

        if options.write == "upsert" and not options.takes_tables:
            context.check_key(options)
        return DeltaPartsSink(options, context)
    if isinstance(options, JournalOptions):
        from firnline.sinks.delta.journal import JournalSink

        return JournalSink(options, context)
    if options.write == "upsert":
        from firnline.sinks.delta.upsert.sink import UpsertSink

        return UpsertSink(options, context)
    if options.mode == "staged":
        from firnline.sinks.staged.sink import StagedDeltaSink

        return StagedDeltaSink(options, context)
    from firnline.sinks.delta.sink import DeltaSink

    return DeltaSink(options, context)


def open_stager(target: dict[str, Json], attempt: str) -> Stager:
    """Open the stager for a target of `DeltaSink.stage_target`."""
    if "records" in target["shape"]:
        from firnline.sinks.delta.upsert.records import RecordStager

        return RecordStager(target, attempt)
    if target["shape"]["write"] == "upsert":
        from firnline.sinks.delta.stage import ChangeStager

        return ChangeStager(target, attempt)
    from firnline.sinks.delta.stage import ParquetStager

    return ParquetStager(target, attempt)


def run_task(task: dict[str, Json]) -> dict[str, Json]:
    """Perform a task of a commit: rewrite files of the table, with changed rows or with wider columns."""
    if "widen" in task:
        from firnline.sinks.delta.widen import run_widen

        return run_widen(task)
    from firnline.sinks.delta.upsert.rewrite import run_rewrite

    return run_rewrite(task)
