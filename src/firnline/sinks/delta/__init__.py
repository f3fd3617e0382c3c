"""Delta tables: files staged by tasks, commits by delta-rs with the checkpoint inside."""

from firnline.sinks.delta.sink import DeltaSink
from firnline.sinks.delta.upsert.sink import UpsertSink

__all__ = ["DeltaSink", "UpsertSink"]
