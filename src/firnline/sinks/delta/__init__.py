"""Delta tables: tasks stage files, delta-rs commits them together with the checkpoint."""

from firnline.sinks.delta.sink import DeltaSink
from firnline.sinks.delta.upsert.sink import UpsertSink

__all__ = ["DeltaSink", "UpsertSink"]
