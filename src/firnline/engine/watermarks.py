"""Watermarks: how far event time has come in each operator. Pure; part of the checkpoint, and never going back."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from firnline.types import Json


@dataclass(frozen=True, slots=True)
class Watermark:
    """Of one operator: the latest event time of every input that gave rows, and what follows from it (microseconds)."""

    inputs: Mapping[str, int] = field(default_factory=dict)
    at: int | None = None

    def advance(self, latest: Mapping[str, int], delay_us: int, *, hold: bool = False) -> Watermark:
        """After rows whose latest times are these. The slowest input that ever gave rows holds it back.

        With `hold`, it stays where it is: an input that never gave rows may be about to.
        """
        inputs = dict(self.inputs)
        for name, time in latest.items():
            inputs[name] = max(time, inputs.get(name, time))
        if not inputs or hold:
            return Watermark(inputs, self.at)
        reached = min(inputs.values()) - delay_us
        return Watermark(inputs, reached if self.at is None else max(self.at, reached))


@dataclass(frozen=True, slots=True)
class Watermarks:
    """Of all operators, by name."""

    operators: Mapping[str, Watermark] = field(default_factory=dict)

    def of(self, operator: str) -> Watermark:
        return self.operators.get(operator, Watermark())

    def set(self, operator: str, watermark: Watermark) -> Watermarks:
        return replace(self, operators={**self.operators, operator: watermark})

    def renamed(self, names: Mapping[str, str], inputs: Mapping[str, Mapping[str, str]]) -> Watermarks:
        """Under today's names: `names` has the old name of every operator, `inputs` those of its inputs.

        What is no input any more holds nothing back.
        """
        found = {}
        for name, old in names.items():
            mark = self.operators.get(name, self.operators.get(old, Watermark()))
            kept = {
                port: mark.inputs.get(port, mark.inputs.get(was))
                for port, was in inputs[name].items()
                if port in mark.inputs or was in mark.inputs
            }
            found[name] = Watermark({port: time for port, time in kept.items() if time is not None}, mark.at)
        return Watermarks(found)

    def to_json(self) -> dict[str, Json]:
        return {name: {"at": w.at, "inputs": dict(w.inputs)} for name, w in self.operators.items()}

    @classmethod
    def from_json(cls, value: Mapping[str, Json]) -> Watermarks:
        """Read what a checkpoint holds."""
        found = {}
        for name, one in value.items():
            at = one["at"]
            inputs = {str(k): int(v) for k, v in one["inputs"].items()}
            found[str(name)] = Watermark(inputs, None if at is None else int(at))
        return cls(found)
