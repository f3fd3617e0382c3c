"""What a checkpoint remembers of the followers of its pipeline: target, first epoch, newest head, set aside or filled.

A follower is its name plus its target. The memory is part of every checkpoint, so it changes only with an epoch: a sink
that is edited out of the spec, or whose target lost rows, is noticed; a sink that is given up is given up for all.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace

from firnline.checkpoint.model import Checkpoint
from firnline.errors import ConfigError
from firnline.options import FollowerOptions, PipelineOptions, SinkOptions
from firnline.types import Json

BEGINNING = "(beginning)"  # no sink has this name
COPY = "copy"  # in the shape of an epoch: its rows for the sink are a copy of a table


@dataclass(frozen=True, slots=True)
class KnownSink:
    """One follower, as a checkpoint remembers it."""

    target: str
    born: int  # the epoch after which it began: it gets every later one
    held: int  # the newest epoch that it was ever seen to hold
    head_name: str  # the name that the target knows it by: its first one, whatever the spec calls it now
    set_aside: str = ""  # why it gets nothing until somebody resyncs it; empty: it is not set aside
    copy: int = 0  # the epoch whose rows are the copy of another sink; 0: it was never copied
    answers: str = ""  # the attempt of the newest epoch that answered dead letters of it; empty: none did
    # While it gets what was before it was added: BEGINNING, or the name of the sink whose rows it gets. Then empty.
    filled_from: str = ""
    filled_since: int = 0  # the generation that decided to fill it
    former: tuple[str, ...] = ()  # ids of lost journals in place of which this one decides: its head may name them
    # First and last of the epochs that history edits took away from the sink: what they wrote or answered is void.
    undone: tuple[tuple[int, int], ...] = ()

    def is_undone(self, epoch: int) -> bool:
        """Return whether a history edit took this epoch away from the sink. Numbers of epochs only grow."""
        return any(first <= epoch <= last for first, last in self.undone)

    def to_json(self) -> dict[str, Json]:
        always = {"target": self.target, "born": self.born, "held": self.held, "head": self.head_name}
        rest: dict[str, Json] = {
            "set_aside": self.set_aside,
            "copy": self.copy,
            "answers": self.answers,
            "filled_from": self.filled_from,
            "filled_since": self.filled_since,
            "former": list(self.former),
            "undone": [list(one) for one in self.undone],
        }
        return always | {name: value for name, value in rest.items() if value}

    @classmethod
    def from_json(cls, value: Json) -> KnownSink:
        return cls(
            target=str(value["target"]),
            born=int(value["born"]),
            held=int(value["held"]),
            head_name=str(value["head"]),
            set_aside=str(value.get("set_aside", "")),
            copy=int(value.get("copy", 0)),
            answers=str(value.get("answers", "")),
            filled_from=str(value.get("filled_from", "")),
            filled_since=int(value.get("filled_since", 0)),
            former=tuple(value.get("former", ())),
            undone=tuple((int(first), int(last)) for first, last in value.get("undone", ())),
        )


def known_sinks(checkpoint: Checkpoint | None) -> dict[str, KnownSink]:
    """Return the followers that a checkpoint remembers, by name."""
    return {name: KnownSink.from_json(one) for name, one in checkpoint.sinks.items()} if checkpoint else {}


def find_known(known: Mapping[str, KnownSink], name: str, former_name: str) -> KnownSink | None:
    """Return what is remembered of a follower: of the one whose target knows it by the same name."""
    return next((one for one in known.values() if one.head_name == (former_name or name)), None)


def name_then(checkpoint: Checkpoint, head_name: str) -> str:
    """Return the name that a follower had when a checkpoint was made; empty if the checkpoint does not know it."""
    return next((name for name, one in known_sinks(checkpoint).items() if one.head_name == head_name), "")


def check_names(followers: Sequence[FollowerOptions]) -> None:
    """Refuse a name that is also the one by which the target of another follower knows it.

    What a follower holds, what waits for it and its dead letters are found by these names: two followers of one name
    would take each other's.

    Raises:
        ConfigError: it names both sinks.
    """
    for one in followers:
        for other in followers:
            if other is not one and one.head_name in (other.name, other.head_name):
                raise ConfigError(
                    f"the name {one.head_name!r} means two sinks: {other.name!r}, and {one.name!r}, whose target knows "
                    f"it as {one.head_name!r}",
                    hint=f"Give sink {other.name!r} another name, one that no other sink has or had.",
                )


def check_targets(sinks: Sequence[SinkOptions]) -> None:
    """Refuse two sinks that write to the same target: they wait for each other's locks, and mix their rows.

    Raises:
        ConfigError: it names both sinks.
    """
    taken: dict[str, str] = {}
    for one in sinks:
        if one.location in taken:
            raise ConfigError(
                f"sink {one.name!r} writes to {one.location}, and so does sink {taken[one.location]!r}",
                hint="Give one of them another target; to write the rows of several inputs into one target, unite them "
                "in an SQL operator.",
            )
        taken[one.location] = one.name


def find_away(checkpoint: Checkpoint | None, followers: Sequence[FollowerOptions]) -> dict[str, str]:
    """Return the followers that are set aside, with the reason, by the names that they have now."""
    known = known_sinks(checkpoint)
    found = {one.name: find_known(known, one.name, one.renamed_from) for one in followers}
    return {name: one.set_aside for name, one in found.items() if one is not None and one.set_aside}


def find_filling(checkpoint: Checkpoint | None, followers: Sequence[FollowerOptions]) -> dict[str, KnownSink]:
    """Return the followers that get what was before they were added, by the names that they have now."""
    known = known_sinks(checkpoint)
    found = {one.name: find_known(known, one.name, one.renamed_from) for one in followers}
    return {name: one for name, one in found.items() if one is not None and one.filled_from and not one.set_aside}


def find_new(options: PipelineOptions, checkpoint: Checkpoint | None) -> list[FollowerOptions]:
    """Return the followers that are to get what was before them, and of which no checkpoint knows."""
    if checkpoint is None or checkpoint.epoch == 0:
        return []
    known = known_sinks(checkpoint)
    return [
        one
        for one in options.followers
        if (one.copy_from or one.start == "beginning") and find_known(known, one.name, one.renamed_from) is None
    ]


def check_known(known: Mapping[str, KnownSink], followers: Sequence[FollowerOptions]) -> None:
    """Refuse a spec that lost a known follower, or writes to a known target under another name.

    Raises:
        ConfigError: it names the sink and the ways out.
    """
    by_head = {one.head_name: one for one in followers}
    for name, one in known.items():
        follower = by_head.get(one.head_name)
        if follower is None:
            other = next((f for f in followers if f.target == one.target), None)
            if other is not None:
                keys = "no `renamed_from`" if other.name == one.head_name else f"`renamed_from: {one.head_name}`"
                raise ConfigError(
                    f"sink {other.name!r} writes to {one.target}, which knows it as {one.head_name!r}",
                    hint=f"If it is the sink that was called {name!r} so far, give it {keys}.",
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
    filling: Collection[str] = (),
) -> dict[str, KnownSink]:
    """Return what the checkpoint of an epoch remembers, from the checkpoint before and the heads that were seen.

    A sink that could not be read has no head now: what it was seen to hold before counts. `filling` are the sinks
    that the run does not count yet, because they are being filled.
    """
    found: dict[str, KnownSink] = {}
    for follower in followers:
        one = find_known(known, follower.name, follower.renamed_from)
        if one is None:
            one = KnownSink(follower.target, epoch - 1, epoch - 1, follower.head_name)
        if not one.set_aside:
            held = max(heads.get(follower.name) or one.held, one.born)
            one = replace(one, held=held, set_aside=set_aside.get(follower.name, ""))
            if one.filled_from and follower.name not in filling:
                one = replace(one, filled_from="", filled_since=0)
        found[follower.name] = one
    return found


def after_going_back(
    sinks: Mapping[str, Json], to_epoch: int, new_epoch: int, kept: Mapping[str, int] | None
) -> dict[str, Json]:
    """Return what is remembered after a history edit that goes back to an epoch, and is the epoch `new_epoch` itself.

    Numbers of epochs only grow, so what sinks hold stays true. A copy that was undone before it arrived never arrives:
    its sink is set aside.

    Args:
        kept: The newest epoch whose rows a sink keeps, by the name that its target knows it by; the epochs between it
            and the edit are void for the sink. A sink that is missing goes back to `to_epoch`. None: all is kept.
    """
    found = {name: KnownSink.from_json(one) for name, one in sinks.items()}
    if kept is not None:
        found = {
            name: _without(one, max(to_epoch, kept.get(one.head_name, 0)) + 1, new_epoch - 1)
            for name, one in found.items()
        }
    undone = "a history edit undid its copy before it was delivered"
    return {
        name: (replace(one, set_aside=undone) if one.copy > to_epoch and one.held < one.copy else one).to_json()
        for name, one in found.items()
    }


def _without(one: KnownSink, first: int, last: int) -> KnownSink:
    if first > last:
        return one
    earlier = tuple(span for span in one.undone if span[0] < first)
    return replace(one, undone=(*earlier, (first, last)))
