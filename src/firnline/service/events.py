"""Events of the service: what changed of a pipeline, for clients that listen (server-sent events).

The newest events are kept, so that a client that comes back gets those it missed. A client that reads too slowly is
dropped: it comes back and asks for what it missed.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import secrets
import threading
from collections import Counter, deque
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import dataclass

from firnline.service.problems import TooManyError
from firnline.types import Json

KEPT = 1000  # events for clients that come back
WAITING = 200  # events that a client has not read yet; one that has more is dropped
PER_TOKEN = 4
HEARTBEAT_SECONDS = 15.0
RETRY_MS = 3000  # how long a client waits before it comes back

Show = Callable[[dict[str, Json]], dict[str, Json]]


@dataclass(frozen=True, slots=True)
class Event:
    """One event: its number, its kind, and what it is about."""

    number: int
    kind: str
    body: dict[str, Json]


class _Listener:
    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self.queue: asyncio.Queue[Event | None] = asyncio.Queue()  # None: the listener is dropped
        self.waiting = 0  # given to the loop, and not sent yet

    def give(self, event: Event | None) -> None:
        with contextlib.suppress(RuntimeError):  # the loop has ended
            self._loop.call_soon_threadsafe(self.queue.put_nowait, event)


class Events:
    """The events of one service. `publish` may be called from any thread; `listen` belongs to the server's loop."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._kept: deque[Event] = deque(maxlen=KEPT)
        self._number = 0
        self._service = secrets.token_hex(4)  # numbers begin anew with each service
        self._listeners: set[_Listener] = set()
        self._by_token: Counter[str] = Counter()

    def publish(self, kind: str, body: dict[str, Json]) -> None:
        """Give an event to everybody who listens."""
        with self._lock:
            self._number += 1
            event = Event(self._number, kind, body)
            self._kept.append(event)
            for listener in list(self._listeners):
                listener.waiting += 1
                if listener.waiting > WAITING:
                    self._listeners.discard(listener)
                    listener.give(None)
                else:
                    listener.give(event)

    def close(self) -> None:
        """Send everybody away: the service ends."""
        with self._lock:
            for listener in self._listeners:
                listener.give(None)
            self._listeners.clear()

    @contextlib.contextmanager
    def admit(self, token: str) -> Iterator[None]:
        """Count a client of a token; TooManyError if the token has too many."""
        with self._lock:
            if self._by_token[token] >= PER_TOKEN:
                raise TooManyError(f"a token may listen {PER_TOKEN} times at once")
            self._by_token[token] += 1
        try:
            yield
        finally:
            with self._lock:
                self._by_token[token] -= 1

    async def listen(
        self,
        last_id: str | None,
        heartbeat_seconds: float = HEARTBEAT_SECONDS,
        *,
        is_valid: Callable[[], bool] = lambda: True,
        show: Show = lambda body: body,
    ) -> AsyncIterator[str]:
        """Yield events as text, those after `last_id` first; `reset` if they are no longer known.

        Args:
            is_valid: Whether the client may still listen; asked before each event.
            show: What the client may see of an event.
        """
        listener = _Listener(asyncio.get_running_loop())
        with self._lock:
            missed = self._find_missed(last_id)
            self._listeners.add(listener)
        try:
            yield f"retry: {RETRY_MS}\n\n"
            if missed is None:
                yield self._text(Event(self._number, "reset", {}), show)
            for event in missed or ():
                yield self._text(event, show)
            while True:
                try:
                    found = await asyncio.wait_for(listener.queue.get(), heartbeat_seconds)
                except TimeoutError:
                    if not is_valid():
                        return
                    yield ": still here\n\n"
                    continue
                if found is None or not is_valid():
                    return
                yield self._text(found, show)
                with self._lock:
                    listener.waiting -= 1
        finally:
            with self._lock:
                self._listeners.discard(listener)

    def _find_missed(self, last_id: str | None) -> list[Event] | None:
        """Return the events after an id; None if some of them are gone, or the id is of another service."""
        if last_id is None:
            return []
        service, _, number = last_id.partition("-")
        if service != self._service or not number.isdecimal() or int(number) > self._number:
            return None
        oldest = self._kept[0].number if self._kept else self._number + 1
        if int(number) + 1 < oldest:
            return None
        return [event for event in self._kept if event.number > int(number)]

    def _text(self, event: Event, show: Show) -> str:
        body = json.dumps(show(event.body), separators=(",", ":"))  # one line: JSON escapes line ends
        return f"id: {self._service}-{event.number}\nevent: {event.kind}\ndata: {body}\n\n"
