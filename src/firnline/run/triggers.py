"""Decides after which epochs a checkpoint of the state is made. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from firnline.options import CheckpointOptions, OperatorOptions


@dataclass(frozen=True, slots=True)
class Since:
    """What happened to one operator's state since its last checkpoint, this epoch included."""

    epochs: int
    millis: float
    records: int
    watermark_then: int | None  # microseconds, at the last checkpoint
    watermark_now: int | None
    never: bool = False  # it has none yet: the first epoch makes one, so that every later checkpoint names its state


def due_operators(
    options: CheckpointOptions, operators: tuple[OperatorOptions, ...], since: Mapping[str, Since], *, asked: bool
) -> frozenset[str]:
    """The operators whose state is checkpointed after this epoch: all of them or none, unless each has its own time."""
    names = [operator.name for operator in operators]
    if asked:
        return frozenset(names)
    if options.mode == "aligned":
        return frozenset(names if any(_is_due(options, since[name]) for name in names) else ())
    found = set()
    for operator in operators:
        past = since[operator.name]
        interval = operator.interval_ms
        in_time = past.millis >= interval if interval is not None else _is_due(options, past)
        if in_time or past.never:
            found.add(operator.name)
    return frozenset(found)


def _is_due(options: CheckpointOptions, since: Since) -> bool:
    trigger = options.trigger
    if since.never:
        return True
    if trigger.every_epochs is not None and since.epochs >= trigger.every_epochs:
        return True
    if trigger.every_ms is not None and since.millis >= trigger.every_ms:
        return True
    if trigger.every_records is not None and since.records >= trigger.every_records:
        return True
    return trigger.event_time_ms is not None and _crossed(trigger.event_time_ms * 1000, since)


def _crossed(step_us: int, since: Since) -> bool:
    """Whether the watermark has passed a multiple of `step_us`."""
    if since.watermark_now is None:
        return False
    return since.watermark_then is None or since.watermark_now // step_us > since.watermark_then // step_us
