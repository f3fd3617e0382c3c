"""What flows through a pipeline: the rates of its sources and sinks in the last minutes, from its epochs. Read-only."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime
from itertools import islice

from firnline.errors import LedgerHoleError
from firnline.run.open_pipeline import OpenPipeline
from firnline.types import Json

SECONDS = 300.0
MOST_EPOCHS = 100  # that are read


@dataclass(frozen=True, slots=True)
class Flow:
    """Rates per second, by name, over a span that ends now; empty if no epoch was read in it."""

    seconds: float = SECONDS
    epochs: int = 0
    sources: Mapping[str, float] = field(default_factory=dict)
    sinks: Mapping[str, float] = field(default_factory=dict)


def load_flow(pipeline: OpenPipeline, now: datetime) -> Flow:
    """Return what the epochs of the last minutes read and wrote. Many short epochs are counted over a shorter span."""
    read: Counter[str] = Counter()
    written: Counter[str] = Counter()
    epochs, seconds = 0, SECONDS
    try:
        for entry in islice(pipeline.entries(pipeline.load().entry), MOST_EPOCHS):
            age = (now - datetime.fromisoformat(entry.checkpoint.created_at)).total_seconds()
            if age > SECONDS:
                break
            epochs += 1
            for name, records in entry.inputs.items():
                read[name] += sum(_count(record) for record in records)
            for name, files in entry.staged.items():
                written[name] += sum(int(file["rows"]) for file in files)
            if epochs == MOST_EPOCHS:
                seconds = max(age, 1.0)
    except LedgerHoleError:  # `status` reports it
        pass
    return Flow(seconds, epochs, _rates(read, seconds), _rates(written, seconds))


def _rates(counts: Counter[str], seconds: float) -> dict[str, float]:
    return {name: count / seconds for name, count in counts.items()}


def _count(record: Mapping[str, Json]) -> int:
    """Return how many records an epoch read of an input, if the source counts them so."""
    first, last = record.get("from"), record.get("to")
    return max(0, last - first) if isinstance(first, int) and isinstance(last, int) else 0
