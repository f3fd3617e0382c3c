"""Events for clients that listen: those that come back, slow ones, and too many of one token."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator
from typing import cast

import pytest

from firnline.service.events import KEPT, PER_TOKEN, WAITING, Events
from firnline.service.problems import TooManyError


async def take(events: Events, count: int, last_id: str | None = None) -> list[str]:
    """Listen until so many texts have come, without the first, which says how long to wait before coming back."""
    stream = cast("AsyncGenerator[str]", events.listen(last_id, heartbeat_seconds=0.05))
    async with contextlib.aclosing(stream):
        found = [await anext(stream) for _ in range(count + 1)]
    assert found[0].startswith("retry: ")
    return found[1:]


def ids(texts: list[str]) -> list[str]:
    return [text.splitlines()[0].removeprefix("id: ") for text in texts]


def test_a_client_that_comes_back_gets_what_it_missed() -> None:
    events = Events()
    for number in range(3):
        events.publish("pipeline", {"number": number, "text": "a\nb"})
    first = asyncio.run(take(events, 1, "nonsense"))
    assert "event: reset" in first[0]
    service = ids(first)[0].partition("-")[0]
    missed = asyncio.run(take(events, 2, f"{service}-1"))
    assert ids(missed) == [f"{service}-2", f"{service}-3"]
    assert missed[0].splitlines()[2] == 'data: {"number":1,"text":"a\\nb"}'
    for last in ("0000-1", f"{service}-99", f"{service}-x"):
        assert "event: reset" in asyncio.run(take(events, 1, last))[0]
    for _ in range(KEPT + 1):
        events.publish("pipeline", {})
    assert "event: reset" in asyncio.run(take(events, 1, f"{service}-1"))[0]


def test_a_quiet_service_still_says_that_it_is_there() -> None:
    assert asyncio.run(take(Events(), 2)) == [": still here\n\n"] * 2


def test_a_slow_client_is_dropped_and_the_others_go_on() -> None:
    async def listen() -> None:
        events = Events()
        slow = cast("AsyncGenerator[str]", events.listen(None))
        await anext(slow)
        for number in range(WAITING + 1):
            events.publish("pipeline", {"number": number})
        found = [text async for text in slow]
        assert len(found) == WAITING  # then it ended
        other = cast("AsyncGenerator[str]", events.listen(None))
        await anext(other)
        events.publish("pipeline", {})
        assert "event: pipeline" in await anext(other)
        events.close()
        assert [text async for text in other] == []

    asyncio.run(listen())


def test_a_token_listens_so_many_times_at_once() -> None:
    events = Events()
    with contextlib.ExitStack() as stack:
        for _ in range(PER_TOKEN):
            stack.enter_context(events.admit("ann"))
        with pytest.raises(TooManyError), events.admit("ann"):
            pass
        with events.admit("bob"):
            pass
    with events.admit("ann"):
        pass
