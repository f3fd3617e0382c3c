"""The kind `http`. Modules are imported on demand: a worker loads neither the client nor the models of a spec."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from firnline.sinks.base import Sink, SinkContext
    from firnline.sinks.http.config import HttpSinkConfig
    from firnline.sinks.http.options import HttpSinkOptions


def config_model() -> type[HttpSinkConfig]:
    """Return the model of the keys of the kind in a spec."""
    from firnline.sinks.http.config import HttpSinkConfig

    return HttpSinkConfig


def open_sink(options: HttpSinkOptions, context: SinkContext) -> Sink:
    """Open a sink. Connects to no server yet.

    Raises:
        ConfigError: the URL or a header is invalid.
    """
    from firnline.sinks.http.sink import HttpSink

    return HttpSink(options, context)
