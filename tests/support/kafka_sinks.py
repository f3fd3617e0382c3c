"""Pipelines with a Kafka sink, and readers of what they wrote."""

from __future__ import annotations

import uuid


def new_sink_name() -> str:
    """Return a name that no other test uses: all of them share a broker."""
    return f"s-{uuid.uuid4().hex[:12]}"
