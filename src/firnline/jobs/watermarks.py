"""Watermarks: how far event time has come in each operator. Pure; part of the checkpoint, and never going back."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field, replace

from firnline.types import Json


@dataclass(frozen=True, slots=True)
class Watermark:
    """Of one operator: the latest event time of every input that gave rows, and what follows from it (microseconds).

    `silent` says since when inputs have given no rows, by the time of epochs; `idle` are those that no longer count.
    Both are only kept for an operator with `idle_after`.
    """

    inputs: Mapping[str, int] = field(default_factory=dict)
    at: int | None = None
    silent: Mapping[str, int] = field(default_factory=dict)
    idle: frozenset[str] = frozenset()

    def note_silence(
        self, quiet: Collection[str], unknown: Collection[str], now_us: int, run_began_us: int, idle_after_us: int
    ) -> Watermark:
        """After an epoch in which the inputs `quiet` gave no rows. Of those in `unknown` nothing is known by then.

        Only silence while a run was there to hear counts. An input that is idle stays so until it speaks.
        """
        known = {name: since for name, since in self.silent.items() if name in quiet}
        silent = {**{name: now_us for name in quiet if name not in unknown}, **known}
        idle = {name for name, since in silent.items() if now_us - max(since, run_began_us) >= idle_after_us}
        return replace(self, silent=silent, idle=frozenset(idle - set(unknown)) | (self.idle & silent.keys()))

    def advance(self, latest: Mapping[str, int], delay_us: int, *, hold: bool = False) -> Watermark:
        """After rows whose latest times are these. The slowest input that gave rows and is not idle holds it back.

        With `hold`, it stays where it is: an input that never gave rows may be about to.
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
    """Of all operators, by name."""

    operators: Mapping[str, Watermark] = field(default_factory=dict)

    def of(self, operator: str) -> Watermark:
        """The watermark of an operator; an empty one before its first row."""
        return self.operators.get(operator, Watermark())

    def set(self, operator: str, watermark: Watermark) -> Watermarks:
        """The same watermarks, with another one for an operator."""
        return replace(self, operators={**self.operators, operator: watermark})

    def renamed(self, names: Mapping[str, str], inputs: Mapping[str, Mapping[str, str]]) -> Watermarks:
        """Under today's names: `names` has the old name of every operator, `inputs` those of its inputs.

        What is no input any more holds nothing back.
        """
        found = {}
        for name, old in names.items():
            mark = self.operators.get(name, self.operators.get(old, Watermark()))
            ports = inputs[name].items()
            idle = frozenset(port for port, was in ports if port in mark.idle or was in mark.idle)
            found[name] = Watermark(_kept(mark.inputs, ports), mark.at, _kept(mark.silent, ports), idle)
        return Watermarks(found)

    def to_json(self) -> dict[str, Json]:
        """The durable form; silence is left out where nobody is silent."""
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
        """Read what a checkpoint holds."""
        found = {}
        for name, one in value.items():
            at = one["at"]
            inputs = {str(k): int(v) for k, v in one["inputs"].items()}
            silent = {str(k): int(v) for k, v in one.get("silent", {}).items()}
            idle = frozenset(str(port) for port in one.get("idle", []))
            found[str(name)] = Watermark(inputs, None if at is None else int(at), silent, idle)
        return cls(found)


def _kept(times: Mapping[str, int], ports: Iterable[tuple[str, str]]) -> dict[str, int]:
    """What is known of inputs, under the names that they have today."""
    return {port: times.get(port, times.get(was, 0)) for port, was in ports if port in times or was in times}
