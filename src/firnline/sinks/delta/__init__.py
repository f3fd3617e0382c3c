"""Delta tables: files staged by tasks, commits by delta-rs with the checkpoint inside."""

from firnline.sinks.delta.sink import DeltaSink

__all__ = ["DeltaSink"]
