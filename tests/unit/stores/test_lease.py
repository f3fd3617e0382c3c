"""The lease: of those who try one succeeds, a living holder is never taken for dead, and wall clocks do not matter."""

from __future__ import annotations

import logging
import os
import random
import threading
from collections.abc import Callable, Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from firnline.errors import AlreadyRunningError, CheckpointError, DamagedError, FencedError
from firnline.options import StoreOptions
from firnline.process import HungError, TimedCalls
from firnline.stores import lease as lease_module
from firnline.stores import open_store
from firnline.stores.base import CheckpointStore
from firnline.stores.lease import (
    KEPT_VERSIONS,
    PRUNE_EVERY,
    Lease,
    LeaseKeeper,
    LeaseRecord,
    Sight,
    Standing,
    Tenure,
    Verdict,
    Watch,
    judge,
    lost_error,
    patience,
    take_now,
    take_unless_held,
    wait_for_lease,
)
from firnline.stores.memory import MemoryStore
from tests.support.s3 import new_bucket, s3_options

SECONDS = 9.0
KEY = "flights/lease"
HUNDREDS = 50 if os.environ.get("FIRNLINE_PROOF") else 2  # of seeds


class FakeClock:
    """Time that passes when it is told to; the wall clock says what it likes."""

    def __init__(self) -> None:
        self.passed = 0.0
        self.wall = datetime(2026, 1, 1, tzinfo=UTC)

    def now(self) -> datetime:
        return self.wall

    def monotonic(self) -> float:
        return self.passed

    def sleep(self, seconds: float) -> None:
        self.passed += seconds


class FlakyStore(MemoryStore):
    """Loses requests or answers, is damaged or hangs on demand."""

    def __init__(self) -> None:
        super().__init__()
        self.down = False
        self.lose_answer = False
        self.damaged = False
        self.go_on = threading.Event()
        self.go_on.set()

    def latest_version(self, key: str) -> int:
        self._fail(self.down)
        return super().latest_version(key)

    def put_raw_versioned(self, key: str, data: bytes, expected: int, note: str = "") -> int:
        self._fail(self.down)
        version = super().put_raw_versioned(key, data, expected, note)
        lost, self.lose_answer = self.lose_answer, False
        self._fail(lost)
        return version

    def prune(self, key: str, keep: int) -> int:
        self._fail(self.down)
        return super().prune(key, keep)

    def _fail(self, when: bool) -> None:
        assert self.go_on.wait(120)
        if self.damaged:
            raise DamagedError("the head does not match its checksum")
        if when:
            raise OSError("the store does not answer")


@pytest.fixture
def clock() -> FakeClock:
    return FakeClock()


@pytest.fixture
def flaky() -> FlakyStore:
    return FlakyStore()


def lease_of(store: CheckpointStore, run: str, clock: FakeClock, seconds: float = SECONDS) -> Lease:
    return Lease(store, "flights", run, seconds, clock)


def record_in(store: CheckpointStore) -> LeaseRecord:
    found = store.get(KEY, LeaseRecord)
    assert found is not None
    return found


def rest_of(clock: FakeClock, most: float = 100.0) -> Callable[[float], bool]:
    """Rests by letting time pass; says stop when it has been too long."""
    end = clock.passed + most

    def rest(seconds: float) -> bool:
        clock.passed += seconds
        return clock.passed > end

    return rest


# -- the decisions ------------------------------------------------------------------------------------


def sight(version: int, at: float, *, took: float = 0.0, released: bool = False, run: str = "other") -> Sight:
    record = LeaseRecord(run, "h", 1, "u", 1, "", "", SECONDS, released=released)
    return Sight(version, record, at, at + took)


def test_a_version_that_does_not_change_is_dead_after_the_holders_own_promise() -> None:
    watch, verdict = Watch("me", patience=1.0).observe(sight(3, 0.0, took=2.0))
    assert verdict is Verdict.WAIT
    assert watch.observe(sight(3, 2.0 + SECONDS - 0.01))[1] is Verdict.WAIT
    assert watch.observe(sight(3, 2.0 + SECONDS))[1] is Verdict.TAKE
    assert watch.observe(sight(4, 2.0 + SECONDS))[1] is Verdict.WAIT
    assert watch.observe(None) == (watch, Verdict.WAIT)


@pytest.mark.parametrize(
    "seen", [Sight(0, None, 0, 0), sight(3, 0.0, released=True), sight(3, 0.0, run="me")], ids=["none", "free", "own"]
)
def test_what_nobody_else_holds_is_taken_at_once(seen: Sight) -> None:
    assert Watch("me", 1.0).observe(seen)[1] is Verdict.TAKE


def test_a_record_that_cannot_be_read_is_waited_for_with_the_watchers_own_patience() -> None:
    watch, verdict = Watch("me", patience=5.0).observe(Sight(3, None, 0.0, 0.0, readable=False))
    assert verdict is Verdict.WAIT
    assert watch.observe(Sight(3, None, 4.9, 4.9, readable=False))[1] is Verdict.WAIT
    assert watch.observe(Sight(3, None, 5.0, 5.0, readable=False))[1] is Verdict.TAKE


def test_a_holder_renews_three_times_within_its_lease_and_tries_on_after_its_end() -> None:
    held = Tenure(1, 1, SECONDS, 0.0)
    assert held.verdict(SECONDS / 3 - 0.01) is Verdict.WAIT
    assert held.verdict(SECONDS / 3) is Verdict.RENEW
    assert held.verdict(SECONDS + 5) is Verdict.RENEW  # it slept: the store tells whether somebody took it
    assert held.unanswered().verdict(SECONDS - 0.01) is Verdict.RENEW
    assert held.unanswered().verdict(10 * SECONDS) is Verdict.RENEW  # only another's version ends a run
    assert [held.unanswered().has_lapsed(at) for at in (SECONDS - 0.01, SECONDS)] == [False, True]
    assert not held.has_lapsed(SECONDS)
    assert held.overtaken().verdict(0.0) is Verdict.LOST
    assert held.wait(1.0) == SECONDS / 3 - 1
    assert held.unanswered().wait(10 * SECONDS) == SECONDS / 12


# -- several processes, in simulated time -------------------------------------------------------------


class Process:
    """A run: watches, or holds; asleep it does nothing, whatever time it is."""

    def __init__(self, name: str, store: FlakyStore, clock: FakeClock) -> None:
        self.lease = lease_of(store, name, clock)
        self.watch = Watch(name, SECONDS)
        self.clock = clock
        self.lost = False
        self.name = name

    @property
    def holds(self) -> bool:
        """What it believes, by its own clock."""
        tenure = self.lease.tenure
        return tenure is not None and not self.lost and self.clock.passed - tenure.since < SECONDS

    def act(self) -> Verdict:
        """One turn; what it did."""
        if self.lost:
            return Verdict.LOST
        if self.lease.tenure is None:
            try:
                seen: Sight | None = self.lease.read()
            except OSError:
                seen = None
            self.watch, verdict = self.watch.observe(seen)
            if verdict is Verdict.TAKE and seen is not None:
                try:
                    return Verdict.TAKE if self.lease.take(seen) else Verdict.WAIT
                except OSError:
                    return Verdict.WAIT
            return verdict
        verdict = self.lease.tenure.verdict(self.clock.passed)
        if verdict is Verdict.RENEW:
            self.lease.renew()
            verdict = self.lease.tenure.verdict(self.clock.passed) if self.lease.tenure.taken_over else Verdict.RENEW
        self.lost = verdict is Verdict.LOST
        return verdict


MOVES = st.lists(
    st.tuples(
        st.integers(0, 2),  # whose turn
        st.floats(0.0, 4.0, allow_nan=False),  # time that passes before
        st.sampled_from(["act", "act", "act", "act", "down", "up", "lose", "release"]),
        st.integers(-400, 400),  # days that the wall clock jumps
    ),
    max_size=80,
)


def play(moves: list[tuple[int, float, str, int]], *, jumps: bool) -> list[tuple[str, Verdict, int]]:
    """Play a schedule; checks what must always hold, and returns what each one did."""
    store, clock = FlakyStore(), FakeClock()
    processes = [Process(f"run-{n}", store, clock) for n in range(3)]
    tokens: list[int] = []
    trace = []
    for who, seconds, verb, days in moves:
        clock.passed += seconds
        if jumps:
            clock.wall += timedelta(days=days)
        one = processes[who]
        if verb == "act":
            before = {p.name for p in processes if p.holds and p is not one}
            did = one.act()
            took = did is Verdict.TAKE and one.lease.tenure is not None
            if took and one.lease.tenure is not None:
                assert not before, "somebody who runs believed to hold it"
                assert not tokens or one.lease.tenure.token > tokens[-1]
                tokens.append(one.lease.tenure.token)
            trace.append((one.name, did, tokens[-1] if tokens else 0))
        elif verb == "release" and one.lease.tenure is not None and not one.lost:
            store.down, down = False, store.down
            one.lease.release()
            one.lost = True
            store.down = down
        else:
            store.down = {"down": True, "up": False}.get(verb, store.down)
            store.lose_answer = verb == "lose"
    return trace


def schedule(seed: int) -> list[tuple[int, float, str, int]]:
    """A long one, in which somebody now and then sleeps for a while."""
    dice = random.Random(seed)
    pace, moves = dice.choice([0.3, 0.8, 1.5]), []
    awake = [0, 1, 2]
    for _ in range(250):
        if dice.random() < 0.1:
            awake = dice.sample([0, 1, 2], dice.randint(1, 3))
        verb = dice.choices(["act", "lose", "down", "up", "release"], [80, 12, 2, 5, 1])[0]
        moves.append((dice.choice(awake), dice.uniform(0, pace), verb, dice.randint(-400, 400)))
    return moves


@pytest.mark.parametrize("hundred", range(HUNDREDS))
def test_nobody_takes_a_lease_whose_holder_believes_in_it_and_tokens_only_grow(hundred: int) -> None:
    takeovers = 0
    for seed in range(hundred * 100, hundred * 100 + 100):
        takeovers += len({token for _, _, token in play(schedule(seed), jumps=bool(seed % 2))})
    assert takeovers > 100


@given(MOVES)
def test_jumps_of_the_wall_clock_change_nothing(moves: list[tuple[int, float, str, int]]) -> None:
    assert play(moves, jumps=True) == play(moves, jumps=False)


# -- on a store ---------------------------------------------------------------------------------------


def store_options(kind: str, request: pytest.FixtureRequest, folder: Path) -> StoreOptions:
    if kind == "s3":
        server = request.getfixturevalue("s3")
        uri = f"s3://{new_bucket(server)}/leases"
        return StoreOptions(type="object", uri=uri, storage_options=s3_options(server))
    if kind == "postgres":
        return StoreOptions(type="postgres", dsn=request.getfixturevalue("postgres"))
    if kind == "object":
        return StoreOptions(type="object", uri=str(folder / "objects"))
    return StoreOptions(type=kind, path=str(folder / "store"))  # type: ignore[arg-type]  # file or sqlite


KINDS = ["file", "sqlite", "object", pytest.param("s3", marks=pytest.mark.s3), "postgres"]


@pytest.fixture(params=KINDS)
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[CheckpointStore]:
    made = open_store(store_options(request.param, request, tmp_path))
    made.delete(KEY)
    yield made
    made.close()


def test_one_of_several_who_try_at_the_same_time_succeeds(store: CheckpointStore, clock: FakeClock) -> None:
    leases = [lease_of(store, f"run-{n}", clock) for n in range(4)]
    seen = [lease.read() for lease in leases]
    results: list[bool] = [False] * 4

    def take(n: int) -> None:
        results[n] = leases[n].take(seen[n])

    threads = [threading.Thread(target=take, args=(n,)) for n in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sum(results) == 1
    winner = leases[results.index(True)]
    assert record_in(store).holder == winner.run
    assert winner.tenure is not None
    assert record_in(store).token == winner.tenure.token == store.latest_version(KEY)


def test_a_lease_is_taken_renewed_lost_and_released(store: CheckpointStore, clock: FakeClock) -> None:
    first, second = lease_of(store, "first", clock), lease_of(store, "second", clock)
    assert take_now(first) is None
    first.renew()
    assert first.tenure is not None
    assert first.tenure.version == first.tenure.token + 1
    former = take_now(second)
    assert former is not None
    assert former.holder == "first"
    assert second.tenure is not None
    assert second.tenure.token > first.tenure.token
    first.renew()
    assert first.tenure.verdict(clock.passed) is Verdict.LOST
    assert first.rival is not None
    assert first.rival.holder == "second"
    first.release()
    assert record_in(store).holder == "second"
    second.release()
    assert record_in(store).released
    third = lease_of(store, "third", clock)
    assert wait_for_lease(third, rest_of(clock), lambda _: pytest.fail("it was free"))
    assert clock.passed == 0


def test_old_versions_are_pruned(store: CheckpointStore, clock: FakeClock) -> None:
    lease = lease_of(store, "first", clock)
    take_now(lease)
    for _ in range(PRUNE_EVERY + 2):
        lease.renew()
    assert len(store.list_versions(KEY)) < KEPT_VERSIONS + PRUNE_EVERY
    assert lease.tenure is not None
    assert (record_in(store).token, lease.tenure.version) == (lease.tenure.token, store.latest_version(KEY))


def test_many_short_runs_prune_too(flaky: FlakyStore, clock: FakeClock) -> None:
    for number in range(3 * PRUNE_EVERY):
        lease = lease_of(flaky, f"run-{number}", clock)
        take_now(lease)
        if number % 3 == 0:
            lease.renew()
        lease.release()
    assert flaky.latest_version(KEY) == 7 * PRUNE_EVERY
    assert len(flaky.list_versions(KEY)) < KEPT_VERSIONS + PRUNE_EVERY


# -- when answers are lost ----------------------------------------------------------------------------


def test_a_take_whose_answer_was_lost_is_found_to_be_ours(flaky: FlakyStore, clock: FakeClock) -> None:
    flaky.lose_answer = True
    lease = lease_of(flaky, "first", clock)
    assert take_now(lease) is None
    assert lease.tenure is not None
    assert (lease.tenure.token, lease.tenure.version, flaky.latest_version(KEY)) == (1, 2, 2)
    flaky.lose_answer = True
    other = lease_of(flaky, "other", clock)
    clock.passed += 1
    lease.release()  # its answer is lost too, but it stands
    assert wait_for_lease(other, rest_of(clock), lambda _: None)


def test_a_renewal_whose_answer_was_lost_does_not_look_like_a_rival(flaky: FlakyStore, clock: FakeClock) -> None:
    lease = lease_of(flaky, "first", clock)
    take_now(lease)
    assert lease.tenure is not None
    flaky.lose_answer = True
    clock.passed = 3.0
    lease.renew()
    assert lease.tenure.failing
    lease.renew()
    assert not lease.tenure.taken_over
    assert lease.tenure.version == flaky.latest_version(KEY)
    assert lease.tenure.since == 0.0  # no later than what is known
    lease.renew()
    assert (lease.tenure.since, lease.tenure.failing) == (3.0, False)


def test_a_standby_waits_out_a_store_that_does_not_answer(flaky: FlakyStore, clock: FakeClock) -> None:
    take_now(lease_of(flaky, "first", clock))
    flaky.down = True
    told: list[Any] = []
    standby = lease_of(flaky, "second", clock)
    assert not wait_for_lease(standby, rest_of(clock, 20), told.append)
    assert told == [None]
    flaky.down = False
    told.clear()
    began = clock.passed
    assert wait_for_lease(standby, rest_of(clock), told.append)
    assert [seen.record.holder for seen in told] == ["first"]
    assert clock.passed - began >= SECONDS


def test_a_store_that_is_gone_is_an_error_of_a_plain_run(flaky: FlakyStore, clock: FakeClock) -> None:
    flaky.down = True
    with pytest.raises(OSError, match="does not answer"):
        take_now(lease_of(flaky, "first", clock))


def test_a_damaged_lease_is_taken_after_a_while(flaky: FlakyStore, clock: FakeClock) -> None:
    flaky.put_raw(KEY, b"{}")
    told: list[Any] = []
    lease = lease_of(flaky, "first", clock)
    assert wait_for_lease(lease, rest_of(clock), told.append)
    assert clock.passed >= SECONDS
    assert [seen.readable for seen in told] == [False]
    assert record_in(flaky).token == 2


def test_a_deleted_lease_is_free_and_its_tokens_still_grow(flaky: FlakyStore, clock: FakeClock) -> None:
    take_now(lease_of(flaky, "first", clock))
    flaky.delete(KEY)
    lease = lease_of(flaky, "second", clock)
    assert take_now(lease) is None
    assert lease.tenure is not None
    assert lease.tenure.token > 2


def test_a_holder_whose_lease_was_deleted_goes_on(flaky: FlakyStore, clock: FakeClock) -> None:
    lease = lease_of(flaky, "first", clock)
    take_now(lease)
    flaky.delete(KEY)
    lease.renew()
    lease.renew()
    assert lease.tenure is not None
    assert lease.tenure.verdict(clock.passed) is Verdict.WAIT
    assert record_in(flaky).holder == "first"
    flaky.delete(KEY)
    lease.release()
    assert record_in(flaky).released


def test_a_holder_whose_lease_was_overwritten_has_lost_it(flaky: FlakyStore, clock: FakeClock) -> None:
    lease = lease_of(flaky, "first", clock)
    take_now(lease)
    flaky.put_raw(KEY, b"{}")
    lease.renew()
    assert lease.tenure is not None
    assert lease.tenure.verdict(clock.passed) is Verdict.LOST
    assert lost_error(lease).message == "the lease was overwritten"
    lease.release()
    assert flaky.latest_version(KEY) == 2


def test_a_conflict_that_cannot_be_looked_into_counts_as_unanswered(flaky: FlakyStore, clock: FakeClock) -> None:
    lease = lease_of(flaky, "first", clock)
    take_now(lease)
    take_now(lease_of(flaky, "second", clock))
    put = flaky.put_raw_versioned

    def conflict_and_fall_silent(key: str, data: bytes, expected: int, note: str = "") -> int:
        try:
            return put(key, data, expected, note)
        finally:
            flaky.down = True

    flaky.put_raw_versioned = conflict_and_fall_silent  # type: ignore[method-assign]
    lease.renew()
    assert lease.tenure is not None
    assert (lease.tenure.failing, lease.tenure.taken_over) == (True, False)
    flaky.down = False
    flaky.put_raw_versioned = put  # type: ignore[method-assign]
    lease.release()  # finds out, and leaves it alone
    assert lease.tenure.taken_over
    assert not record_in(flaky).released


def test_a_lease_that_is_not_held_is_not_released(flaky: FlakyStore, clock: FakeClock) -> None:
    lease_of(flaky, "first", clock).release()
    assert flaky.latest_version(KEY) == 0


def test_versions_that_cannot_be_pruned_are_no_failure(
    flaky: FlakyStore, clock: FakeClock, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse(key: str, keep: int) -> int:
        raise OSError("read-only")

    monkeypatch.setattr(flaky, "prune", refuse)
    lease = lease_of(flaky, "first", clock)
    take_now(lease)
    for _ in range(PRUNE_EVERY):
        lease.renew()
    assert "not deleted" in caplog.text
    assert lease.tenure is not None
    assert not lease.tenure.failing


def test_a_version_that_is_replaced_while_it_is_read_is_looked_for_again(
    flaky: FlakyStore, clock: FakeClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = lease_of(flaky, "first", clock)
    take_now(first)
    get = flaky.get_version_raw

    def replace_and_get(key: str, version: int) -> bytes | None:
        if version == 1:
            first.renew()
            flaky.prune(key, 1)
        return get(key, version)

    monkeypatch.setattr(flaky, "get_version_raw", replace_and_get)
    seen = lease_of(flaky, "second", clock).read()
    assert seen.record is not None
    assert (seen.version, seen.record.holder) == (2, "first")


def test_those_who_are_always_later_give_up_at_some_time(
    flaky: FlakyStore, clock: FakeClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    lease = lease_of(flaky, "first", clock)
    monkeypatch.setattr(lease, "take", lambda _: False)
    with pytest.raises(CheckpointError, match="several runs"):
        take_now(lease)


def test_a_standby_whose_take_is_unclear_or_too_late_goes_on_waiting(flaky: FlakyStore, clock: FakeClock) -> None:
    flaky.lose_answer = True
    lease = lease_of(flaky, "first", clock)
    assert wait_for_lease(lease, rest_of(clock), lambda _: pytest.fail("it is ours"))
    assert record_in(flaky).holder == "first"
    lease.release()
    second, third = lease_of(flaky, "second", clock), lease_of(flaky, "third", clock)
    look = second.read

    def look_and_be_late() -> Sight:
        seen = look()
        if third.tenure is None:
            take_now(third)
        return seen

    second.read = look_and_be_late  # type: ignore[method-assign]
    assert not wait_for_lease(second, rest_of(clock, SECONDS / 2), lambda _: None)
    assert record_in(flaky).holder == "third"


def test_a_user_without_a_name_has_a_number(
    flaky: FlakyStore, clock: FakeClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    def unknown() -> str:
        raise OSError("no such user")

    monkeypatch.setattr("getpass.getuser", unknown)
    take_now(lease_of(flaky, "first", clock))
    assert record_in(flaky).user == str(os.getuid())


@pytest.mark.parametrize("damage", [{"token": "x"}, {"pid": None}, {"lease_seconds": "long"}])
def test_a_record_of_another_shape_is_damaged(damage: dict[str, Any]) -> None:
    whole = LeaseRecord("r", "h", 1, "u", 1, "a", "b", 1.0).to_json()
    assert LeaseRecord.from_json(whole).to_json() == whole
    with pytest.raises(DamagedError):
        LeaseRecord.from_json({**whole, **damage})
    with pytest.raises(DamagedError):
        LeaseRecord.from_json([])


# -- the keeper's thread ------------------------------------------------------------------------------


class RealTime(FakeClock):
    """Passes by itself."""

    def monotonic(self) -> float:
        import time

        return time.monotonic()


def test_the_keeper_renews_and_releases_at_the_end(flaky: FlakyStore) -> None:
    clock = RealTime()
    lease = lease_of(flaky, "first", clock, seconds=0.3)
    take_now(lease)
    renewed = threading.Event()
    put = flaky.put_raw_versioned

    def noting(key: str, data: bytes, expected: int, note: str = "") -> int:
        if expected >= 3:
            renewed.set()
        return put(key, data, expected, note)

    flaky.put_raw_versioned = noting  # type: ignore[method-assign]
    with LeaseKeeper(lease, clock, lambda error: pytest.fail(error.message)):
        assert renewed.wait(120)
    assert record_in(flaky).released


@pytest.mark.parametrize("how", ["taken", "taken-and-gone"])
def test_the_keeper_tells_why_the_lease_is_lost(flaky: FlakyStore, how: str) -> None:
    clock = RealTime()
    lease = lease_of(flaky, "first", clock, seconds=0.3)
    take_now(lease)
    lost: list[FencedError] = []
    told = threading.Event()

    def note(error: FencedError) -> None:
        lost.append(error)
        told.set()

    other = lease_of(flaky, "second", clock)
    take_now(other)
    if how == "taken-and-gone":
        other.release()
    with LeaseKeeper(lease, clock, note):
        assert told.wait(120)
    words = {"taken": "run second on ", "taken-and-gone": "and has ended"}
    assert words[how] in lost[0].message
    assert lost[0].exit_code == 5
    assert len(lost) == 1


class Said(logging.Handler):
    """Lets a test wait for what the lease's thread says."""

    def __init__(self) -> None:
        super().__init__()
        self.heard = threading.Condition()
        self.words: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        with self.heard:
            self.words.append(f"{record.levelname} {record.getMessage()}")
            self.heard.notify_all()

    def count(self, word: str) -> int:
        return sum(word in text for text in self.words)

    def wait_for(self, word: str, times: int = 1) -> None:
        with self.heard:
            assert self.heard.wait_for(lambda: self.count(word) >= times, 120), self.words


@pytest.fixture
def said() -> Iterator[Said]:
    handler, before = Said(), lease_module.logger.level
    lease_module.logger.addHandler(handler)
    lease_module.logger.setLevel(logging.DEBUG)
    yield handler
    lease_module.logger.setLevel(before)
    lease_module.logger.removeHandler(handler)


@pytest.mark.parametrize("outage", ["down", "damaged"])
def test_an_outage_of_the_store_ends_no_run(flaky: FlakyStore, said: Said, outage: str) -> None:
    clock = RealTime()
    lease = lease_of(flaky, "first", clock, seconds=0.3)
    take_now(lease)
    with LeaseKeeper(lease, clock, lambda error: pytest.fail(error.message)):
        for times in (1, 2):
            setattr(flaky, outage, True)
            said.wait_for("the lease lapsed: the store cannot be reached; going on, the table decides", times)
            tries = said.count("lease not renewed")
            said.wait_for("lease not renewed", tries + 3)
            assert said.count("the lease lapsed") == times  # once for each outage
            assert said.count("WARNING lease not renewed") == times
            setattr(flaky, outage, False)
            said.wait_for("the lease is renewed again", times)
    assert record_in(flaky).released


def test_a_lease_that_another_took_during_an_outage_is_lost_when_the_store_answers(
    flaky: FlakyStore, said: Said
) -> None:
    clock = RealTime()
    lease = lease_of(flaky, "first", clock, seconds=0.3)
    take_now(lease)
    lost: list[FencedError] = []
    told = threading.Event()

    def note(error: FencedError) -> None:
        lost.append(error)
        told.set()

    flaky.down = True
    with LeaseKeeper(lease, clock, note):
        said.wait_for("the lease lapsed")
        record = LeaseRecord("second", "h", 1, "u", 2, "", "", 0.3)
        flaky.put_raw(KEY, b"{}")
        flaky.delete(KEY)
        flaky.put(KEY, record)
        assert not lost
        flaky.down = False
        assert told.wait(120)
    assert [(e.exit_code, "run second on h:1 took the lease over" in e.message) for e in lost] == [(5, True)]


def test_a_bug_does_not_end_the_keeper_without_a_word(
    flaky: FlakyStore, said: Said, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = RealTime()
    lease = lease_of(flaky, "first", clock, seconds=0.3)
    take_now(lease)

    def broken() -> None:
        raise ZeroDivisionError

    with LeaseKeeper(lease, clock, lambda error: pytest.fail(error.message)):
        with monkeypatch.context() as patch:
            patch.setattr(lease, "renew", broken)
            said.wait_for("renewing the lease failed")
            said.wait_for("the lease lapsed")
            assert said.count("ERROR renewing the lease failed") == 1
        said.wait_for("the lease is renewed again")
    assert record_in(flaky).released


def test_a_damaged_store_is_one_that_does_not_answer(flaky: FlakyStore, clock: FakeClock) -> None:
    lease = lease_of(flaky, "first", clock)
    take_now(lease)
    version = flaky.latest_version(KEY)
    flaky.damaged = True
    lease._find_out()
    lease._prune(PRUNE_EVERY)
    assert lease.tenure is not None
    assert (lease.tenure.failing, lease.tenure.taken_over) == (True, False)
    with pytest.raises(DamagedError):
        take_now(lease_of(flaky, "second", clock))
    told: list[Any] = []
    assert not wait_for_lease(lease_of(flaky, "third", clock), rest_of(clock, 20), told.append)
    assert told == [None]
    flaky.damaged = False
    assert flaky.latest_version(KEY) == version


# -- a store that hangs -------------------------------------------------------------------------------


def calls_under_way() -> int:
    return sum(thread.name == "firnline call" for thread in threading.enumerate())


def test_a_store_that_hangs_holds_up_nobody_who_takes_or_stands_by(flaky: FlakyStore, clock: FakeClock) -> None:
    first, second = lease_of(flaky, "first", clock), lease_of(flaky, "second", clock)
    first.timed_calls = second.timed_calls = TimedCalls(0.05)
    flaky.go_on.clear()
    before = calls_under_way()
    try:
        with pytest.raises(HungError, match=r"no answer for 0\.05 s"):
            take_now(first)
        told: list[Any] = []
        assert not wait_for_lease(second, rest_of(clock, 5), told.append)
        assert told == [None]
        assert calls_under_way() == before + 1  # those who wait again do not pile up
        assert second.timed_calls.busy
    finally:
        flaky.go_on.set()
    second.timed_calls = TimedCalls(120)
    assert wait_for_lease(second, rest_of(clock), told.append)


def test_a_renewal_that_hangs_does_not_hold_up_the_end(
    flaky: FlakyStore, said: Said, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lease_module, "EXIT_SECONDS", 0.1)
    clock = RealTime()
    lease = lease_of(flaky, "first", clock, seconds=0.3)
    take_now(lease)
    hangs = threading.Event()
    put = flaky.put_raw_versioned

    def hang(key: str, data: bytes, expected: int, note: str = "") -> int:
        hangs.set()
        assert flaky.go_on.wait(120)
        return put(key, data, expected, note)

    monkeypatch.setattr(flaky, "put_raw_versioned", hang)
    flaky.go_on.clear()
    try:
        with LeaseKeeper(lease, clock, lambda error: pytest.fail(error.message)):
            assert hangs.wait(120)
        assert said.count("lease not released") == 1
        assert lease.timed_calls.busy
    finally:
        flaky.go_on.set()
    lease.timed_calls.call(lambda: None, 120)  # what was given up ends by itself, one after the other
    assert record_in(flaky).released


@pytest.mark.parametrize(("seconds", "most"), [(0.5, 5.0), (15.0, 15.0), (3600.0, 30.0)])
def test_patience_with_a_store_has_a_floor_and_an_end(seconds: float, most: float) -> None:
    assert patience(seconds) == most


# -- a start that does not stand by ---------------------------------------------------------------------


def seen_lease(age: float, *, released: bool = False, holder: str = "a") -> Sight:
    renewed = (datetime(2026, 1, 1, tzinfo=UTC) - timedelta(seconds=age)).isoformat()
    record = LeaseRecord(holder, "elsewhere", 1, "u", 1, renewed, renewed, SECONDS, released=released)
    return Sight(1, record, 0.0, 0.0)


@pytest.mark.parametrize(
    ("sight", "exited", "standing"),
    [
        (Sight(0, None, 0.0, 0.0), False, Standing.FREE),
        (Sight(1, None, 0.0, 0.0, readable=False), False, Standing.UNCERTAIN),
        (seen_lease(1), False, Standing.ALIVE),
        (seen_lease(-1), False, Standing.ALIVE),
        (seen_lease(1), True, Standing.FREE),
        (seen_lease(1, released=True), False, Standing.FREE),
        (seen_lease(1, holder="b"), False, Standing.FREE),
        (seen_lease(SECONDS), False, Standing.UNCERTAIN),
        (seen_lease(-SECONDS), False, Standing.UNCERTAIN),
    ],
)
def test_a_start_judges_the_lease(sight: Sight, exited: bool, standing: Standing) -> None:
    assert judge(sight, "b", datetime(2026, 1, 1, tzinfo=UTC), exited=exited) is standing


def held_elsewhere(store: FlakyStore, clock: FakeClock, monkeypatch: pytest.MonkeyPatch) -> Lease:
    """The lease of a run on another machine."""
    with monkeypatch.context() as patch:
        patch.setattr("socket.gethostname", lambda: "elsewhere")
        holder = Lease(store, "flights", "a", SECONDS, clock)
        assert holder.take(holder.read())
    return holder


def test_an_expired_lease_is_watched_for_a_moment_and_taken(
    flaky: FlakyStore, clock: FakeClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    held_elsewhere(flaky, clock, monkeypatch)
    lease = Lease(flaky, "flights", "b", SECONDS, clock)
    with pytest.raises(AlreadyRunningError, match=r"run a on elsewhere \(pid \d+\) since 2026-01-01T00:00:00Z"):
        take_unless_held(lease, lambda _: pytest.fail("it is alive"))
    clock.wall += timedelta(seconds=SECONDS)

    def rest(seconds: float) -> bool:
        clock.sleep(seconds)
        return False

    former = take_unless_held(lease, rest)
    assert former is not None
    assert former.holder == "a"
    assert SECONDS / 2 <= clock.passed < SECONDS


def test_a_lease_that_only_looks_expired_is_left_to_its_holder(
    flaky: FlakyStore, clock: FakeClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    holder = held_elsewhere(flaky, clock, monkeypatch)
    lease = Lease(flaky, "flights", "b", SECONDS, clock)
    clock.wall += timedelta(hours=1)
    other_clock = FakeClock()  # of the holder's machine: an hour behind
    holder._clock = other_clock

    def rest(seconds: float) -> bool:
        clock.sleep(seconds)
        holder.renew()
        return False

    with pytest.raises(AlreadyRunningError):
        take_unless_held(lease, rest)
    assert holder.tenure is not None
    assert not holder.tenure.taken_over


def test_a_renewal_between_the_judgement_and_the_write_wins(
    flaky: FlakyStore, clock: FakeClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    holder = held_elsewhere(flaky, clock, monkeypatch)
    lease = Lease(flaky, "flights", "b", SECONDS, clock)
    verdicts = iter([Standing.FREE, Standing.ALIVE])

    def judge_late(_: Sight) -> Standing:
        holder.renew()
        return next(verdicts)

    monkeypatch.setattr(lease, "judge", judge_late)
    with pytest.raises(AlreadyRunningError):
        take_unless_held(lease, lambda _: False)
    assert lease.tenure is None


def test_a_store_that_is_gone_is_an_error_of_a_start(flaky: FlakyStore, clock: FakeClock) -> None:
    flaky.down = True
    with pytest.raises(OSError):
        take_unless_held(Lease(flaky, "flights", "b", SECONDS, clock), lambda _: False)


def test_a_start_whose_answer_was_lost_finds_its_own_lease(flaky: FlakyStore, clock: FakeClock) -> None:
    flaky.lose_answer = True
    lease = Lease(flaky, "flights", "b", SECONDS, clock)
    assert take_unless_held(lease, lambda _: False) is None
    assert lease.tenure is not None


def test_a_record_without_a_start_is_still_read() -> None:
    value = LeaseRecord("a", "h", 1, "u", 1, "t", "t", SECONDS).to_json()
    del value["start"]
    assert LeaseRecord.from_json(value).start == ""
