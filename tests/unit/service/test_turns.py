"""Turns: requests about a pipeline whose storage does not answer hold up nobody else."""

from __future__ import annotations

import asyncio

import pytest

from firnline.service.turns import BusyError, Turns


def test_each_pipeline_has_its_turns_and_those_who_wait_get_them_in_order() -> None:
    async def play() -> list[str]:
        turns, gate, order = Turns(each=2, total=3), asyncio.Event(), list[str]()

        async def ask(name: str, number: int) -> None:
            async with turns.turn(name):
                order.append(f"{name}{number}")
                await gate.wait()

        asked = [asyncio.create_task(ask("a", number)) for number in range(4)]
        asked += [asyncio.create_task(ask(name, 0)) for name in "bc"]
        await asyncio.sleep(0)
        order.append("open")
        gate.set()
        await asyncio.gather(*asked)
        return order

    assert asyncio.run(play()) == ["a0", "a1", "b0", "open", "a2", "a3", "c0"]


def test_who_waits_too_long_or_goes_away_takes_no_turn() -> None:
    async def play() -> None:
        turns, gate = Turns(each=1, total=9, wait_seconds=0.01), asyncio.Event()

        async def hold() -> None:
            async with turns.turn("a"):
                await gate.wait()

        async def ask() -> None:
            async with turns.turn("a"):
                pass

        holder = asyncio.create_task(hold())
        await asyncio.sleep(0)
        with pytest.raises(BusyError):
            await ask()
        gone = asyncio.create_task(ask())
        await asyncio.sleep(0)
        gone.cancel()
        with pytest.raises(asyncio.CancelledError):
            await gone
        gate.set()
        await holder
        await ask()
        assert not turns._taken
        assert not turns._waiting

    asyncio.run(play())
