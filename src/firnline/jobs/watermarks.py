"""Watermarks: the progress of event time in each operator. Pure; part of the checkpoint, and never decreasing."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field, replace

from firnline.types import Json


@dataclass(frozen=True, slots=True)
class Watermark:
    """The watermark of one operator: the latest event time of every input with rows, and the result (microseconds).

    `silent` has the time since when inputs gave no rows, by the time of epochs; `idle` has those that no longer count.
    Both are only kept for an operator with `idle_after`.
    """

    inputs: Mapping[str, int] = field(default_factory=dict)
    at: int | None = None
    silent: Mapping[str, int] = field(default_factory=dict)
    idle: frozenset[str] = frozenset()

    def note_silence(
        self, quiet: Collection[str], unknown: Collection[str], now_us: int, run_began_us: int, idle_after_us: int
    ) -> Watermark:
        """Return the watermark after an epoch in which the inputs `quiet` gave no rows. Inputs in `unknown` did not
        answer.

        Only silence during a run counts. An idle input stays idle until it gives rows.
        """
        known = {name: since for name, since in self.silent.items() if name in quiet}
        silent = {**{name: now_us for name in quiet if name not in unknown}, **known}
        idle = {name for name, since in silent.items() if now_us - max(since, run_began_us) >= idle_after_us}
        return replace(self, silent=silent, idle=frozenset(idle - set(unknown)) | (self.idle & silent.keys()))

    def advance(self, latest: Mapping[str, int], delay_us: int, *, hold: bool = False) -> Watermark:
        """Return the watermark after rows with these latest times. The slowest input that gave rows and is not idle
        limits it.

        With `hold` it does not move: an input that never gave rows may be about to.
        """
        inputs = dict(self.inputs)
        for name, time in latest.items():
            inputs[name] = max(time, inputs.get(name, time))
        heard = [time for name, time in inputs.items() if name not in self.idle]
        if not heard or hold:
            return replace(self, inputs=inputs)
        reached = min(heard) - delay_us
        return replace(self, inputs=inputs, at=reached if self.at is None else max(self.at, reached))


@dataclass(frozen=True, slots=True)
class Watermarks:
    """The watermarks of all operators, by name."""

    operators: Mapping[str, Watermark] = field(default_factory=dict)

    def of(self, operator: str) -> Watermark:
        """Return the watermark of an operator; an empty one before its first row."""
        return self.operators.get(operator, Watermark())

    def set(self, operator: str, watermark: Watermark) -> Watermarks:
        """Return the watermarks with another one for an operator."""
        return replace(self, operators={**self.operators, operator: watermark})

    def renamed(self, names: Mapping[str, str], inputs: Mapping[str, Mapping[str, str]]) -> Watermarks:
        """Return the watermarks under current names: `names` has the old name of every operator, `inputs` those of its
        inputs.

        A removed input no longer limits the watermark.
        """
        watermarks = {}
        for name, old in names.items():
            mark = self.operators.get(name, self.operators.get(old, Watermark()))
            ports = inputs[name].items()
            idle = frozenset(port for port, was in ports if port in mark.idle or was in mark.idle)
            watermarks[name] = Watermark(_kept(mark.inputs, ports), mark.at, _kept(mark.silent, ports), idle)
        return Watermarks(watermarks)

    def to_json(self) -> dict[str, Json]:
        """Return the durable form; silence is omitted if no input is silent."""
        return {
            name: {
                "at": w.at,
                "inputs": dict(w.inputs),
                **({"silent": dict(w.silent)} if w.silent else {}),
                **({"idle": sorted(w.idle)} if w.idle else {}),
            }
            for name, w in self.operators.items()
        }

    @classmethod
    def from_json(cls, value: Mapping[str, Json]) -> Watermarks:
        """Parse the durable form in a checkpoint."""
        watermarks = {}
        for name, one in value.items():
            at = one["at"]
            inputs = {str(k): int(v) for k, v in one["inputs"].items()}
            silent = {str(k): int(v) for k, v in one.get("silent", {}).items()}
            idle = frozenset(str(port) for port in one.get("idle", []))
            watermarks[str(name)] = Watermark(inputs, None if at is None else int(at), silent, idle)
        return cls(watermarks)


def _kept(times: Mapping[str, int], ports: Iterable[tuple[str, str]]) -> dict[str, int]:
    """Return the known values of inputs under their current names."""
    return {port: times.get(port, times.get(was, 0)) for port, was in ports if port in times or was in times}
