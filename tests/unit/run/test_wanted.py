"""What operators want: the newest wish counts, whoever writes at the same moment, and a run obeys it."""

from __future__ import annotations

import itertools
import threading
from pathlib import Path

import pytest

from firnline.clock import SystemClock
from firnline.errors import DamagedError
from firnline.names import wanted_folder, wish_name
from firnline.run.wanted import KEPT_WISHES, Orders, Wanted, Wishes, WishFollower
from firnline.storage import LocalStorage


def wishes(folder: Path) -> Wishes:
    return Wishes(LocalStorage(str(folder)), "p", SystemClock())


def test_the_newest_wish_counts(tmp_path: Path) -> None:
    assert wishes(tmp_path).load() is None
    first = wishes(tmp_path).put("running", "ann")
    second = wishes(tmp_path).put("paused", "bob")
    newest = wishes(tmp_path).load()
    assert newest == second
    assert (first.number, second.number, second.by) == (1, 2, "bob")


def test_who_asks_again_makes_a_new_wish(tmp_path: Path) -> None:
    first = wishes(tmp_path).put("running", "ann")
    again = wishes(tmp_path).put("running", "bob")
    assert (again.number, again.by) == (first.number + 1, "bob")
    assert wishes(tmp_path).load() == again
    assert wishes(tmp_path).put("stopped", "eve", after=first.number) == again  # somebody came first
    assert wishes(tmp_path).put("stopped", "eve", after=0) == again
    assert [wish.by for wish in wishes(tmp_path).load_later(0)] == ["ann", "bob"]
    assert wishes(tmp_path).load_later(again.number) == []


def test_words_count_in_the_order_of_their_wishes() -> None:
    for order in itertools.permutations(enumerate(("running", "stopped", "paused"), 1)):
        run = Run()
        orders = Orders(run)
        for number, wanted in order:
            orders.obey(number, wanted)  # type: ignore[arg-type]
            orders.obey(number, wanted)  # type: ignore[arg-type]
        assert run.calls[-1] == "pause"
        assert len(run.calls) == len(set(run.calls))
        told = [{"resume": 1, "stop": 2, "pause": 3}[call] for call in run.calls]
        assert told == sorted(told)


def test_a_word_that_comes_late_waits_for_the_one_that_is_being_told(tmp_path: Path) -> None:
    entered, go = threading.Event(), threading.Event()

    class Slow(Run):
        def resume(self) -> bool:
            entered.set()
            assert go.wait(60)
            return super().resume()

    run = Slow()
    orders = Orders(run)
    later = threading.Thread(target=orders.obey, args=(3, "running"))
    later.start()
    assert entered.wait(60)
    early = threading.Thread(target=orders.obey, args=(2, "stopped"))
    early.start()
    go.set()
    later.join(60)
    early.join(60)
    assert run.calls == ["resume"]


def test_only_the_newest_wishes_are_kept(tmp_path: Path) -> None:
    words: list[Wanted] = ["running", "paused"]
    for number in range(3 * KEPT_WISHES):
        wishes(tmp_path).put(words[number % 2], "ann")
    files = sorted(path.name for path in (tmp_path / wanted_folder("p")).iterdir())
    assert len(files) == KEPT_WISHES
    assert files[-1] == wish_name(3 * KEPT_WISHES)


def test_a_damaged_wish_is_not_replaced_by_an_older_one(tmp_path: Path) -> None:
    wishes(tmp_path).put("running", "ann")
    newest = wishes(tmp_path).put("stopped", "ann")
    path = tmp_path / wanted_folder("p") / wish_name(newest.number)
    path.write_bytes(path.read_bytes().replace(b"stopped", b"running"))
    with pytest.raises(DamagedError):
        wishes(tmp_path).load()
    assert wishes(tmp_path).put("stopped", "bob").number == newest.number + 1


def test_wishes_at_the_same_moment_all_get_a_number(tmp_path: Path) -> None:
    barrier = threading.Barrier(8)

    def put(number: int) -> None:
        barrier.wait()
        wishes(tmp_path).put("running" if number % 2 else "stopped", f"user {number}")

    threads = [threading.Thread(target=put, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    newest = wishes(tmp_path).load()
    assert newest is not None
    assert newest.number == len(list((tmp_path / wanted_folder("p")).iterdir()))


class Run:
    def __init__(self) -> None:
        self.calls: list[str] = []

    def pause(self) -> bool:
        self.calls.append("pause")
        return True

    def resume(self) -> bool:
        self.calls.append("resume")
        return True

    def stop(self) -> None:
        self.calls.append("stop")


def test_a_run_obeys_before_it_plans_and_while_it_runs(tmp_path: Path) -> None:
    wishes(tmp_path).put("paused", "ann")
    run, said = Run(), list[str]()
    stopped = threading.Event()

    class Stopping(Run):
        def stop(self) -> None:
            super().stop()
            stopped.set()

    run = Stopping()
    with WishFollower(wishes(tmp_path), run, said.append, seconds=0.01):
        assert run.calls == ["pause"]
        wishes(tmp_path).put("stopped", "bob")
        assert stopped.wait(60)
    assert run.calls == ["pause", "stop"]
    assert "bob wants the pipeline stopped" in said[-1]


def test_a_wish_that_cannot_be_read_changes_nothing_and_is_reported_once(tmp_path: Path) -> None:
    newest = wishes(tmp_path).put("stopped", "ann")
    (tmp_path / wanted_folder("p") / wish_name(newest.number)).write_bytes(b"{")
    run, said = Run(), list[str]()
    follower = WishFollower(wishes(tmp_path), run, said.append, seconds=0.01)
    for _ in range(3):
        follower._look()
    assert run.calls == []
    assert len(said) == 1


def test_what_is_asked_of_the_run_itself_is_recorded_and_not_obeyed_twice(tmp_path: Path) -> None:
    run = Run()
    follower = WishFollower(wishes(tmp_path), run, lambda _: None)
    number = follower.wish("paused", "ann")
    assert number is not None
    assert follower.orders.obey(number, "paused")
    follower._look()
    assert run.calls == ["pause"]
    newest = wishes(tmp_path).load()
    assert newest is not None
    assert newest.wanted == "paused"
