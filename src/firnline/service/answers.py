"""Answers to reads: each is made once in a while, however many clients ask for it, and given to all of them.

An answer is at most `KEPT_SECONDS` old. An action, the end of a job, and a change that the supervisor saw end the
answers about their pipeline; actions and jobs also end the lists of all pipelines. A client that wants none that was
kept sends `Cache-Control: no-cache`. The header `Age` tells how old an answer is, in whole seconds.
"""

from __future__ import annotations

import asyncio
import threading
from collections import OrderedDict
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from typing import Any, TypeVar

from fastapi.routing import APIRoute
from starlette.requests import Request
from starlette.responses import Response

from firnline.service.access.guard import SAFE_METHODS
from firnline.service.access.tokens import Identity
from firnline.service.registry import MAX_PIPELINES
from firnline.types import Clock

KEPT_SECONDS = 2.0  # as long as the supervisor takes from one look at a pipeline to the next
MOST_BYTES = 8 * 1024 * 1024  # of all answers that are kept
LARGEST_BYTES = 512 * 1024  # of one of them
_OVERHEAD_BYTES = 1024  # of an answer besides its body
_MARK = "answers_are_kept"


@dataclass(frozen=True, slots=True)
class _Key:
    """What an answer depends on. `pipeline`: the one that it is about; None for a list of all."""

    pipeline: str | None
    identity: Identity
    path: str
    query: bytes


@dataclass(frozen=True, slots=True)
class _Kept:
    response: Response
    made_at: float
    era: int
    size_bytes: int


class Answers:
    """The answers of one service. `forget` may be called from any thread; the rest belongs to the server's loop."""

    def __init__(self, clock: Clock, kept_seconds: float = KEPT_SECONDS) -> None:
        self._clock = clock
        self._kept_seconds = kept_seconds
        self._lock = threading.Lock()
        self._eras: dict[str | None, int] = {}  # by pipeline: answers of an era that has ended are not given
        self._newest_era = self._oldest_era = 0
        self._kept: OrderedDict[_Key, _Kept] = OrderedDict()
        self._size_bytes = 0
        self._under_way: dict[tuple[_Key, int], asyncio.Future[Response | None]] = {}

    def forget(self, pipeline: str | None, *, lists: bool = True) -> None:
        """Give no answer about a pipeline any more that was begun before now; nor, with `lists`, a list of all."""
        with self._lock:
            self._newest_era += 1
            if len(self._eras) > MAX_PIPELINES:  # names that clients made up
                self._eras.clear()
                self._oldest_era = self._newest_era
            self._eras[pipeline] = self._newest_era
            if lists:
                self._eras[None] = self._newest_era

    def _era(self, key: _Key) -> int:
        with self._lock:
            return self._eras.get(key.pipeline, self._oldest_era)

    async def get(self, key: _Key, make: Callable[[], Coroutine[Any, Any, Response]]) -> Response:
        """Return the answer that is kept, that somebody waits for already, or that `make` makes."""
        now, era = self._clock.monotonic(), self._era(key)
        kept = self._kept.get(key)
        if kept is not None and kept.era == era and 0 <= now - kept.made_at < self._kept_seconds:
            return _again(kept.response, now - kept.made_at)
        waiting = self._under_way.get((key, era))
        if waiting is not None:
            response = await asyncio.shield(waiting)
            return _again(response, 0.0) if response is not None else await make()
        future: asyncio.Future[Response | None] = asyncio.get_running_loop().create_future()
        self._under_way[key, era] = future
        try:
            response = await make()
            if response.status_code == 200:
                self._keep(key, _Kept(response, now, era, len(response.body) + _OVERHEAD_BYTES))
                future.set_result(response)
            return response
        finally:
            del self._under_way[key, era]
            if not future.done():
                future.set_result(None)  # it failed, or its client went away: each of the others asks for itself

    def _keep(self, key: _Key, kept: _Kept) -> None:
        if kept.size_bytes > LARGEST_BYTES or kept.era != self._era(key):
            return
        before = self._kept.pop(key, None)
        self._size_bytes += kept.size_bytes - (before.size_bytes if before else 0)
        self._kept[key] = kept
        while self._size_bytes > MOST_BYTES:
            self._size_bytes -= self._kept.popitem(last=False)[1].size_bytes


def _again(response: Response, age_seconds: float) -> Response:
    """Return the same answer for another client; a response belongs to one."""
    same = Response(response.body, response.status_code)
    same.raw_headers = [*response.raw_headers, (b"age", str(int(age_seconds)).encode())]
    return same


_Endpoint = TypeVar("_Endpoint", bound=Callable[..., Any])


def kept(endpoint: _Endpoint) -> _Endpoint:
    """Keep the answers of a route to GET. They may depend on the path, the query and the token, and on nothing else."""
    setattr(endpoint, _MARK, True)
    return endpoint


class AnswerRoute(APIRoute):
    """A route that gives kept answers, if its endpoint is marked so; a request that may change something ends them.

    A request about a pipeline waits for its turn.
    """

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        handle = super().get_route_handler()
        is_kept = getattr(self.endpoint, _MARK, False)

        async def answer(request: Request) -> Response:
            service = request.app.state.service
            answers: Answers = service.answers
            name = request.path_params.get("name")
            is_read = request.method in SAFE_METHODS

            async def make() -> Response:
                if name is None:
                    return await handle(request)
                async with (service.reads if is_read else service.changes).turn(name):
                    return await handle(request)

            if not is_read:
                try:
                    return await make()
                finally:
                    answers.forget(name)
            identity = request.state.identity
            if not is_kept or identity is None or "no-cache" in request.headers.get("cache-control", ""):
                return await make()
            key = _Key(name, identity, request.scope["path"], request.scope["query_string"])
            return await answers.get(key, make)

        return answer
