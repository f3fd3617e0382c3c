"""Which units may be committed: the chain, forks, gaps, generations."""

from __future__ import annotations

import random
import time
from dataclasses import replace

from hypothesis import given, settings
from hypothesis import strategies as st

from firnline.checkpoint.codec import checksum, short_number
from firnline.checkpoint.model import Checkpoint
from firnline.sinks.staged.chain import LogHead, arrange
from firnline.sinks.staged.unit import Unit
from firnline.types import EntryRef


def unit(epoch: int, name: str, previous: Unit | None, generation: int = 1) -> Unit:
    checkpoint = Checkpoint("p", epoch, generation, "run", name, "2026-01-01T00:00:00+00:00", {"s": {}})
    entry = EntryRef(epoch, f"{name}.json", checksum(name.encode()))
    return Unit(name, checkpoint, entry, previous.entry if previous else None, "", [], [])


def chain(length: int, generation: int = 1, prefix: str = "u") -> list[Unit]:
    made: list[Unit] = []
    for epoch in range(1, length + 1):
        made.append(unit(epoch, f"{prefix}{epoch}", made[-1] if made else None, generation))
    return made


def after(units: list[Unit], epoch: int, generation: int = 1, **claim: int) -> LogHead:
    entry = units[epoch - 1].digest if epoch else None
    return LogHead(epoch, entry, generation, **claim)


def test_a_gapless_chain_is_ready_in_order() -> None:
    units = chain(4)
    found = arrange(after(units, 0), list(reversed(units)))
    assert found.ready == units
    assert [found.waiting, found.forks, found.past, found.gap] == [[], [], [], None]


def test_a_gap_is_waited_for_and_shown() -> None:
    units = chain(5)
    found = arrange(after(units, 1), [units[1], units[4]])
    assert found.ready == [units[1]]
    assert found.waiting == [units[4]]
    assert found.gap == (3, 4)
    assert not found.forks


def test_units_at_or_below_the_log_are_past() -> None:
    units = chain(3)
    found = arrange(after(units, 2), units)
    assert found.past == units[:2]
    assert found.ready == units[2:]


def test_an_earlier_generation_counts_only_up_to_the_adopted_tip() -> None:
    old = chain(4)
    claim = after(old, 1, generation=2, tip_epoch=3, tip=old[2].digest)
    new = unit(4, "n4", old[2], generation=2)
    found = arrange(claim, [*old[1:], new])
    assert found.ready == [old[1], old[2], new]
    assert found.forks == [old[3]]


def test_a_zombies_unit_for_a_taken_epoch_is_a_fork_with_its_descendants() -> None:
    old = chain(2)
    zombie3 = unit(3, "z3", old[1])
    zombie4 = unit(4, "z4", zombie3)
    claim = after(old, 2, generation=2, tip_epoch=2, tip=old[1].digest)
    new3 = unit(3, "n3", old[1], generation=2)
    found = arrange(claim, [zombie3, zombie4, new3])
    assert found.ready == [new3]
    assert {u.name for u in found.forks} == {"z3", "z4"}


def test_two_units_of_one_generation_for_one_epoch_leave_one() -> None:
    a, b = unit(1, "a", None), unit(1, "b", None)
    found = arrange(LogHead(generation=1), [a, b])
    assert len(found.ready) == 1
    assert len(found.forks) == 1


def test_nothing_of_an_earlier_generation_counts_when_the_tip_is_committed() -> None:
    old = chain(3)
    claim = after(old, 1, generation=2, tip_epoch=1, tip=old[0].digest)
    found = arrange(claim, old[1:])
    assert found.ready == []
    assert found.forks == old[1:]


def test_a_gap_right_after_the_log_is_shown() -> None:
    units = chain(5)
    assert arrange(after(units, 1), [units[3], units[4]]).gap == (2, 3)


def test_units_below_an_adopted_tip_that_is_not_listed_yet_wait() -> None:
    """A listing may miss what was put while it ran: nothing on the adopted path is taken for a fork."""
    old = chain(4)
    claim = after(old, 0, generation=2, tip_epoch=4, tip=old[3].digest)
    beyond = unit(5, "z5", old[3])
    for missing in range(1, 4):
        listed = [u for u in old if u is not old[missing]]
        found = arrange(claim, [*listed, beyond])
        assert found.forks == [beyond]
        assert found.ready == []
        assert {u.name for u in found.waiting} == {u.name for u in listed}
        assert found.gap == (missing + 1, missing + 1)


def test_the_same_entry_under_two_names_is_no_fork() -> None:
    """A sink that lags may get an epoch from two runs; both units name the same entry."""
    first = chain(2)
    again = replace(first[1], name="u2-2", claimed=2)
    found = arrange(after(first, 1), [first[1], again])
    assert found.ready == [again]
    assert found.repeats == [first[1]]
    assert not found.forks


def test_ten_thousand_units_are_sorted_out_quickly() -> None:
    units = chain(10_000)
    began = time.process_time()
    assert arrange(after(units, 0), units).ready == units
    assert time.process_time() - began < 2  # of this process: a busy machine does not count


def test_the_digest_is_what_the_log_holds() -> None:
    one = unit(1, "x", None)
    assert one.digest == short_number(one.entry.checksum)


@settings(max_examples=300, deadline=None)
@given(st.integers(0, 2**32))
def test_ready_units_always_stand_on_the_log_and_on_each_other(seed: int) -> None:
    """Random histories of writers, zombies and partial listings: never a unit onto anything but its predecessor."""
    rng = random.Random(seed)
    generation, chains, everything = 1, [[]], []  # type: ignore[var-annotated]  # lists of units
    truth: list[Unit] = []
    for number in range(rng.randint(1, 12)):
        if rng.random() < 0.25:
            generation += 1
            chains.append(list(truth))
        own = chains[-1] if rng.random() < 0.7 else rng.choice(chains)
        of = chains.index(own) + 1
        made = unit(len(own) + 1, f"{number}-{of}", own[-1] if own else None, of)
        own.append(made)
        everything.append(made)
        if own is chains[-1]:
            truth = list(own)
    committed = rng.randint(0, len(truth))
    adopted = [u for u in truth if u.generation < generation]
    tip = adopted[-1] if adopted else None
    log_head = LogHead(
        committed,
        truth[committed - 1].digest if committed else None,
        generation,
        tip.epoch if tip else 0,
        tip.digest if tip else None,
    )
    listed = [u for u in everything if rng.random() < 0.8]
    found = arrange(log_head, listed)
    at, epoch = log_head.entry, log_head.epoch
    for ready in found.ready:
        assert (ready.previous_digest, ready.epoch) == (at, epoch + 1)
        assert ready in truth, "a fork was taken for the chain"
        at, epoch = ready.digest, ready.epoch
    parts = [*found.ready, *found.waiting, *found.forks, *found.past]
    assert sorted(u.name for u in parts) == sorted(u.name for u in listed), "every unit has one place"
