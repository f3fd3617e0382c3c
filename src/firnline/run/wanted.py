"""What an operator wants of a pipeline: that it runs, is paused or is stopped. It lies in the home.

Each wish is a numbered file, created only if it does not exist: of two operators at the same moment one comes second,
and the later wish counts. The service and `firnline run --supervised` obey the newest one.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol, cast, get_args

from firnline.checkpoint.codec import canonical, parse, seal, unseal
from firnline.errors import DamagedError, FirnlineError, VersionConflictError
from firnline.names import wanted_folder, wish_name, wish_number
from firnline.storage import Storage
from firnline.types import Clock

logger = logging.getLogger(__name__)

Wanted = Literal["running", "paused", "stopped"]
KEPT_WISHES = 20
TRIES = 100  # each is another wish that came first
LOOK_SECONDS = 2.0


@dataclass(frozen=True, slots=True)
class Wish:
    """What somebody wants: since when, and by whom."""

    wanted: Wanted
    by: str
    at: str  # RFC 3339, UTC
    number: int


class Wishes:
    """The wishes for one pipeline, below `_firnline/<pipeline>/wanted/` of its home."""

    def __init__(self, storage: Storage, pipeline: str, clock: Clock) -> None:
        self._storage = storage
        self._pipeline = pipeline
        self._folder = wanted_folder(pipeline)
        self._clock = clock

    def load(self) -> Wish | None:
        """Return the newest wish; None if there was never one.

        Raises:
            DamagedError: the newest wish cannot be read. An older one is no substitute: it may say the opposite.
        """
        numbers = self._numbers()
        return self._read(numbers[-1]) if numbers else None

    def put(self, wanted: Wanted, by: str, after: int | None = None) -> Wish:
        """Record a wish, durable on return. Returns the newest wish.

        Whoever asks again for the same makes a new wish: what happened for the former one does not count for it.

        Args:
            after: The number of the newest wish, 0 for none; if there is a later one by now, that one stays.

        Raises:
            VersionConflictError: gave up, because others wish for something all the time.
        """
        for _ in range(TRIES):
            numbers = self._numbers()
            if after is not None and numbers and numbers[-1] != after:
                return self._read(numbers[-1])
            wish = Wish(wanted, by, self._clock.now().isoformat(), numbers[-1] + 1 if numbers else 1)
            body = {"wanted": wish.wanted, "by": wish.by, "at": wish.at}
            try:
                self._storage.put_new(f"{self._folder}/{wish_name(wish.number)}", canonical(seal(body)))
            except FileExistsError:
                continue
            for number in numbers[: -KEPT_WISHES + 1]:
                self._storage.delete(f"{self._folder}/{wish_name(number)}")
            return wish
        raise VersionConflictError(f"gave up on what is wanted of {self._pipeline!r} after {TRIES} conflicts")

    @property
    def has_any(self) -> bool:
        """Whether somebody has decided about the pipeline."""
        return bool(self._numbers())

    def load_later(self, number: int) -> list[Wish]:
        """Return the wishes that came after one, oldest first, as far as they are kept.

        Raises:
            DamagedError: one of them cannot be read.
        """
        return [self._read(later) for later in self._numbers() if later > number]

    def _numbers(self) -> list[int]:
        found = (wish_number(stat.name) for stat in self._storage.list(self._folder))
        return sorted(number for number in found if number is not None)

    def _read(self, number: int) -> Wish:
        name = wish_name(number)
        what = f"wish {number} for {self._pipeline!r}"
        body = unseal(parse(self._storage.get(f"{self._folder}/{name}"), what), what)
        if body.get("wanted") not in get_args(Wanted):
            raise DamagedError(f"{what} is for {body.get('wanted')!r}", what=what)
        return Wish(cast("Wanted", body["wanted"]), str(body["by"]), str(body["at"]), number)


class Obedient(Protocol):
    """The operations of a run that follow from a wish. All return at once."""

    def pause(self) -> bool: ...

    def resume(self) -> bool: ...

    def stop(self) -> None: ...


class Orders:
    """Makes a run obey words in the order of their wishes: one that comes late does not undo a later one."""

    def __init__(self, run: Obedient) -> None:
        self._run = run
        self._lock = threading.Lock()
        self._newest = 0

    def obey(self, number: int, wanted: Wanted) -> bool:
        """Do what a wish says, unless the run knows it already or knows a later one. Returns whether it changed."""
        with self._lock:  # also while the run is told: two threads must not tell it in the wrong order
            if number <= self._newest:
                return False
            self._newest = number
            return self.do(wanted)

    def do(self, wanted: Wanted) -> bool:
        """Do it, whatever was wished before."""
        if wanted == "paused":
            return self._run.pause()
        if wanted == "running":
            return self._run.resume()
        self._run.stop()
        return True


class WishFollower:
    """Makes a run obey the newest wish, from `with` to its end: looks at intervals, on a thread of its own.

    A wish that cannot be read changes nothing; it is reported once.
    """

    def __init__(
        self, wishes: Wishes, run: Obedient, say: Callable[[str], None], seconds: float = LOOK_SECONDS
    ) -> None:
        self._wishes = wishes
        self.orders = Orders(run)
        self._say = say
        self._seconds = seconds
        self._problem = ""
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._follow, name="firnline wanted", daemon=True)

    def __enter__(self) -> WishFollower:
        self._look()  # before the run plans anything: a paused pipeline starts paused
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join(self._seconds)  # storage may hang; the thread does not hold the process

    def wish(self, wanted: Wanted, by: str) -> int | None:
        """Record what somebody asks of the run itself, so that the next run obeys it, too.

        Returns its number, for `orders.obey`; None if it cannot be recorded, which is reported.
        """
        try:
            return self._wishes.put(wanted, by).number
        except (OSError, FirnlineError) as error:
            self._say(f"the wish that the pipeline is {wanted} could not be recorded: {error}")
            return None

    def _follow(self) -> None:
        while not self._stop.wait(self._seconds):
            self._look()

    def _look(self) -> None:
        try:
            wish = self._wishes.load()
        except (OSError, FirnlineError) as error:
            if str(error) != self._problem:
                self._problem = str(error)
                self._say(f"cannot read what is wanted of the pipeline, and goes on: {error}")
            return
        self._problem = ""
        if wish is not None and self.orders.obey(wish.number, wish.wanted):
            words = "to run" if wish.wanted == "running" else wish.wanted
            self._say(f"{wish.by} wants the pipeline {words}, since {wish.at}")


def find_charged(number: int, later: Sequence[Wish]) -> int:
    """Return the wish that the end of a run belongs to, which was started for wish `number`.

    It is the last stop that came while the run lived, which it obeyed; otherwise the newest wish of all, since the run
    obeyed it. An end that belongs to an older wish than the newest does not count for that one.
    """
    stops = [wish.number for wish in later if wish.wanted == "stopped"]
    return stops[-1] if stops else max((wish.number for wish in later), default=number)
