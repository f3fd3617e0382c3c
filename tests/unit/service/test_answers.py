"""Answers that are kept: made once for many, ended by what the service does, bounded, never another client's."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import replace

import pytest
from starlette.responses import Response

from firnline.clock import SystemClock
from firnline.service import answers as answers_module
from firnline.service.access.tokens import Identity
from firnline.service.answers import KEPT_SECONDS, MOST_BYTES, Answers, _Key

READER = Identity("wall", "read")
KEY = _Key("flights", READER, "/api/v1/pipelines/flights/sinks", b"")
LIST = _Key(None, READER, "/api/v1/pipelines", b"")


class FakeClock(SystemClock):
    """Stands still until somebody moves it."""

    seconds = 1000.0

    def monotonic(self) -> float:
        return self.seconds

    def advance(self, seconds: float) -> None:
        self.seconds += seconds


class Maker:
    """Makes answers, each with its number; `gate` holds them up."""

    def __init__(self, status: int = 200, size: int = 0) -> None:
        self.made = 0
        self.status = status
        self.size = size
        self.gate = asyncio.Event()
        self.gate.set()
        self.meanwhile: Callable[[], None] = lambda: None

    async def __call__(self) -> Response:
        self.made += 1
        number = self.made
        self.meanwhile()
        await self.gate.wait()
        if self.status == 0:
            raise RuntimeError(f"failed {number}")
        return Response(str(number).encode().ljust(self.size), self.status, headers={"X-Number": str(number)})


def test_an_answer_is_made_once_in_a_while() -> None:
    clock, make = FakeClock(), Maker()
    answers = Answers(clock)

    async def ask() -> list[tuple[bytes, str | None, str]]:
        found = [await answers.get(KEY, make) for _ in range(2)]
        clock.advance(KEPT_SECONDS)
        found.append(await answers.get(KEY, make))
        return [(bytes(one.body), one.headers.get("age"), one.headers["x-number"]) for one in found]

    assert asyncio.run(ask()) == [(b"1", None, "1"), (b"1", "0", "1"), (b"2", None, "2")]


def test_who_asks_while_it_is_made_waits_for_it() -> None:
    make = Maker()
    answers = Answers(FakeClock())

    async def ask() -> list[bytes]:
        make.gate.clear()
        tasks = [asyncio.create_task(answers.get(KEY, make)) for _ in range(5)]
        await asyncio.sleep(0)
        tasks[3].cancel()  # one who goes away harms nobody
        await asyncio.sleep(0)
        make.gate.set()
        found = await asyncio.gather(*tasks, return_exceptions=True)
        assert isinstance(found.pop(3), asyncio.CancelledError)
        return [bytes(one.body) for one in found if isinstance(one, Response)]

    assert asyncio.run(ask()) == [b"1"] * 4
    assert make.made == 1


def test_when_the_first_goes_away_the_others_get_their_answer() -> None:
    make = Maker()
    answers = Answers(FakeClock())

    async def ask() -> list[bytes]:
        make.gate.clear()
        tasks = [asyncio.create_task(answers.get(KEY, make)) for _ in range(3)]
        await asyncio.sleep(0)
        tasks[0].cancel()
        await asyncio.sleep(0)
        make.gate.set()
        return [bytes((await one).body) for one in tasks[1:]]

    assert sorted(asyncio.run(ask())) == [b"2", b"3"]


@pytest.mark.parametrize("status", [0, 404, 504])
def test_a_failure_is_nobody_elses(status: int) -> None:
    make = Maker(status)
    answers = Answers(FakeClock())

    async def ask() -> None:
        for _ in range(2):
            found = await asyncio.gather(*(answers.get(KEY, make) for _ in range(2)), return_exceptions=True)
            assert all(isinstance(one, RuntimeError) or one.status_code == status for one in found)  # type: ignore[union-attr]

    asyncio.run(ask())
    assert make.made == 4


@pytest.mark.parametrize(
    ("pipeline", "lists", "key", "made"),
    [
        ("flights", True, KEY, 2),
        ("flights", False, KEY, 2),
        ("orders", True, KEY, 1),
        ("orders", True, LIST, 2),
        ("orders", False, LIST, 1),
        (None, True, KEY, 1),
    ],
)
def test_what_a_change_ends(pipeline: str | None, lists: bool, key: _Key, made: int) -> None:
    make = Maker()
    answers = Answers(FakeClock())

    async def ask() -> None:
        await answers.get(key, make)
        answers.forget(pipeline, lists=lists)
        await answers.get(key, make)

    asyncio.run(ask())
    assert make.made == made


def test_a_change_while_an_answer_is_made_ends_it() -> None:
    make = Maker()
    answers = Answers(FakeClock())

    async def ask() -> list[bytes]:
        make.meanwhile = lambda: answers.forget("flights")
        first = await answers.get(KEY, make)
        make.meanwhile = lambda: None
        return [bytes(one.body) for one in (first, await answers.get(KEY, make), await answers.get(KEY, make))]

    assert asyncio.run(ask()) == [b"1", b"2", b"2"]


def test_who_asks_after_a_change_does_not_get_what_was_begun_before() -> None:
    make = Maker()
    answers = Answers(FakeClock())

    async def ask() -> list[bytes]:
        make.gate.clear()
        before = asyncio.create_task(answers.get(KEY, make))
        await asyncio.sleep(0)
        answers.forget("flights")
        after = asyncio.create_task(answers.get(KEY, make))
        await asyncio.sleep(0)
        make.gate.set()
        return [bytes((await one).body) for one in (before, after)]

    assert asyncio.run(ask()) == [b"1", b"2"]


def test_names_that_clients_made_up_are_bounded_and_end_no_promise(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(answers_module, "MAX_PIPELINES", 10)
    make = Maker()
    answers = Answers(FakeClock())

    async def ask() -> None:
        await answers.get(KEY, make)
        answers.forget("flights")
        for number in range(100):
            answers.forget(f"no-{number}")
            assert len(answers._eras) <= 12
        await answers.get(KEY, make)

    asyncio.run(ask())
    assert make.made == 2


def test_tokens_share_nothing() -> None:
    make = Maker()
    answers = Answers(FakeClock())

    async def ask() -> None:
        for other in (READER, Identity("wall", "read", data=True), Identity("wall", "admin"), Identity("ann", "read")):
            await answers.get(replace(KEY, identity=other), make)

    asyncio.run(ask())
    assert make.made == 4


def test_what_is_kept_is_bounded() -> None:
    make = Maker(size=100_000)
    answers = Answers(FakeClock())

    async def ask() -> None:
        for number in range(300):
            await answers.get(replace(KEY, query=str(number).encode()), make)
            assert answers._size_bytes <= MOST_BYTES
        assert answers._size_bytes == sum(one.size_bytes for one in answers._kept.values())
        make.size = 1_000_000
        for _ in range(2):
            await answers.get(LIST, make)

    asyncio.run(ask())
    assert make.made == 302
