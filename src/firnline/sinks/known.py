"""What a checkpoint remembers of the followers of its pipeline: target, first epoch, newest head, set aside or not.

A follower is its name plus its target. The memory is part of every checkpoint, so it changes only with an epoch: a sink
that is edited out of the spec, or whose target lost rows, is noticed; a sink that is given up is given up for all.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from firnline.checkpoint.model import Checkpoint
from firnline.errors import ConfigError
from firnline.options import FollowerOptions
from firnline.types import Json


@dataclass(frozen=True, slots=True)
class KnownSink:
    """One follower, as a checkpoint remembers it."""

    target: str
    born: int  # the epoch after which it began: it gets every later one
    held: int  # the newest epoch that it was seen to hold
    set_aside: str = ""  # why it gets nothing until somebody resyncs it; empty: it is not set aside
    answers: str = ""  # the attempt of the newest epoch that answered dead letters of it; empty: none did

    def to_json(self) -> dict[str, Json]:
        found: dict[str, Json] = {"target": self.target, "born": self.born, "held": self.held}
        if self.set_aside:
            found["set_aside"] = self.set_aside
        if self.answers:
            found["answers"] = self.answers
        return found

    @classmethod
    def from_json(cls, value: Json) -> KnownSink:
        return cls(
            target=str(value["target"]),
            born=int(value["born"]),
            held=int(value["held"]),
            set_aside=str(value.get("set_aside", "")),
            answers=str(value.get("answers", "")),
        )


def known_sinks(checkpoint: Checkpoint | None) -> dict[str, KnownSink]:
    """Return the followers that a checkpoint remembers, by name."""
    return {name: KnownSink.from_json(one) for name, one in checkpoint.sinks.items()} if checkpoint else {}


def find_away(checkpoint: Checkpoint | None) -> dict[str, str]:
    """Return the followers that are set aside, with the reason."""
    return {name: one.set_aside for name, one in known_sinks(checkpoint).items() if one.set_aside}


def check_known(known: Mapping[str, KnownSink], followers: Sequence[FollowerOptions]) -> None:
    """Refuse a spec that lost a known follower, or writes to a known target under another name.

    Raises:
        ConfigError: it names the sink and the ways out.
    """
    former = {one.renamed_from: one for one in followers if one.renamed_from}
    by_name = {one.name: one for one in followers}
    for name, one in known.items():
        follower = by_name.get(name) or former.get(name)
        if follower is None:
            other = next((f for f in followers if f.target == one.target), None)
            if other is not None:
                raise ConfigError(
                    f"sink {other.name!r} writes to {one.target}, which sink {name!r} has written to so far",
                    hint=f"Give it the name {name!r} again, or add `renamed_from: {name}` to sink {other.name!r}.",
                )
            raise ConfigError(
                f"the pipeline delivers to sink {name!r} ({one.target}), which the spec no longer has",
                hint=f"Put it back, or give it up for good: firnline sinks forget {name} --yes",
            )
        if follower.target != one.target:
            raise ConfigError(
                f"sink {name!r} has written to {one.target} so far, and the spec names {follower.target}",
                hint=f"Change it back; or give the old one up, and the new one begins with the next epoch: "
                f"firnline sinks forget {name} --yes",
            )


def newest_seen(known: Mapping[str, KnownSink], heads: Mapping[str, int]) -> dict[str, int]:
    """Return the newest epoch that each follower was seen to hold. One that could not be read has the head 0."""
    return {
        name: max(epoch or known[name].held, known[name].born) if name in known else epoch
        for name, epoch in heads.items()
    }


def next_known(
    known: Mapping[str, KnownSink],
    followers: Sequence[FollowerOptions],
    epoch: int,
    heads: Mapping[str, int],
    set_aside: Mapping[str, str],
) -> dict[str, KnownSink]:
    """Return what the checkpoint of an epoch remembers, from the checkpoint before and the heads that were seen."""
    heads = newest_seen(known, heads)
    found: dict[str, KnownSink] = {}
    for follower in followers:
        one = known.get(follower.name) or known.get(follower.renamed_from)
        if one is None:
            one = KnownSink(follower.target, born=epoch - 1, held=epoch - 1)
        if not one.set_aside:
            held = heads.get(follower.name, one.held)
            one = replace(one, held=held, set_aside=set_aside.get(follower.name, ""))
        found[follower.name] = one
    return found
