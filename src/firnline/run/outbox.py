"""The outbox of a run: what it may forget, what it keeps, and which sinks lag too far behind."""

from __future__ import annotations

import logging
import shutil
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, replace
from datetime import datetime, timedelta

from firnline.checkpoint.ledger import Fold, LedgerEntry
from firnline.checkpoint.model import Checkpoint
from firnline.errors import LedgerHoleError, OutboxFullError
from firnline.options import PipelineOptions
from firnline.run.commits import settled_epoch
from firnline.run.made_rows import FilledEpochs
from firnline.run.open_pipeline import OpenPipeline
from firnline.run.progress import Progress
from firnline.sinks.known import KnownSink, find_away, find_filling, known_sinks, newest_seen, next_known
from firnline.sinks.outbox import list_outbox, sweep_outbox, waiting_for
from firnline.storage import LocalStorage, Storage
from firnline.types import Json

logger = logging.getLogger(__name__)

LAG = timedelta(minutes=1)  # a follower that lacks an epoch for so long lags; before, it may be delivering
WAIT_SECONDS = 0.05  # between two looks at a follower that is waited for
RESERVE_PARTS = 8  # a follower for which this part of the reserve waits is worth giving up, however young the rows are


@dataclass(frozen=True, slots=True)
class _Waiting:
    """An epoch of the chain whose attempt has files in the outbox."""

    epoch: int
    made_at: datetime
    sizes: Mapping[str, int]  # bytes, by the sink that they wait for: of a follower, the name that its target knows
    absent: tuple[str, ...] = ()  # sinks with files there that the spec does not have


class Outbox:
    """The outbox of one run. `heads` gives the epoch of every sink that is not set aside, `filling` names those of them
    that are being filled: they hold back ledger entries, but no file of the outbox. `may_deliver` says whether a sink
    that lags may get rows yet: it has not failed, and the run does not end.

    Files of a sink that is fed from the outbox stay for `outbox.keep` after they are delivered, in case that the sink
    goes back.
    """

    def __init__(
        self,
        pipeline: OpenPipeline,
        progress: Progress,
        heads: Callable[[], Mapping[str, int]],
        filling: Callable[[], Collection[str]],
        may_deliver: Callable[[str], bool],
    ) -> None:
        self._pipeline = pipeline
        self._progress = progress
        self._heads = heads
        self._filling = filling
        self._may_deliver = may_deliver
        self._spared: set[str] = set()  # sinks with waiting rows that the spec does not have
        self._waiting: dict[str, _Waiting] = {}  # by attempt, as far as known
        self._is_listed = False  # whether `_waiting` has what earlier runs left

    def note(self, entry: LedgerEntry) -> None:
        """Note a decided epoch."""
        self._waiting[entry.checkpoint.attempt] = _waiting(entry)

    def sweep(self) -> None:
        """Delete the files of lost attempts and of epochs that every sink holds.

        Files for a sink that was removed from the spec stay, in case it returns. Files of epochs that a ledger hole
        hides stay, too.

        The outbox is listed first. An attempt that writes by then is in flight here, or the deciding table holds a
        newer generation, and then nothing is deleted. The epochs in flight are read before the chain, so an epoch
        decided meanwhile is in one of the two.

        Raises:
            FencedError: another run owns the pipeline.
        """
        pipeline = self._pipeline
        listed = list_outbox(pipeline.storage, pipeline.options.name)
        made = FilledEpochs(pipeline.storage, pipeline.options.name)
        left = made.list_files()
        if listed or left:
            pipeline.open_readers()[0].check_holder(self._progress.generation)
            reruns, heads = set(self._progress.reruns), self._heads()
            filling = find_filling(self._progress.head.checkpoint, pipeline.options.followers)
            made.sweep(left, reruns, {one.head_name: heads.get(name, 0) for name, one in filling.items()})
        if not listed:
            self._waiting.clear()
            return
        needed = set(self._progress.epochs)
        needed |= self._needed_by_sinks({attempt: keys for attempt, keys in listed.items() if attempt not in needed})
        gone = sweep_outbox(pipeline.storage, listed, needed)
        self._waiting = {attempt: one for attempt, one in self._waiting.items() if attempt in needed}
        if gone:
            logger.info("outbox swept", extra={"files": gone})

    def fold_below(self, floor: int) -> int:
        """Return the epoch below which ledger entries may be folded: no sink needs them any more.

        The outbox is swept before: what it still holds keeps its entry.
        """
        held = self._held()
        waiting = [one.epoch for one in self._waiting.values() if self._is_needed(one, held)]
        return min([floor, held + 1, *(epoch + 1 for epoch in self._heads().values()), *waiting])

    def remember(self, before: Checkpoint | None, epoch: int) -> dict[str, Json]:
        """Return what the checkpoint of an epoch remembers of the followers; gives those up that lag too far.

        Raises:
            OutboxFullError: too much waits, and the spec says that this stops the run.
        """
        followers, heads = self._pipeline.options.followers, self._heads()
        if not followers:
            return {}
        if not self._is_listed:
            self._learn(list_outbox(self._pipeline.storage, self._pipeline.options.name))
            self._is_listed = True
        known, filling = known_sinks(before), self._filling()
        found = next_known(known, followers, epoch, heads, self._find_given_up(known), filling)
        return {name: one.to_json() for name, one in found.items()}

    def _find_given_up(self, known: Mapping[str, KnownSink]) -> dict[str, str]:
        """Return the followers to set aside, with the reason.

        Where the spec says stop, one that is being delivered to is waited for: it may need long, and a run that ends
        meanwhile would end its delivery, too, at every start.
        """
        options = self._pipeline.options
        # Once: another thread may learn meanwhile that a sink was set aside.
        heads = {name: epoch for name, epoch in self._heads().items() if name not in known or not known[name].set_aside}
        full = self._find_full(known, heads)
        while full and options.outbox.on_full == "stop":
            name, reason = next(iter(full.items()))
            if not self._may_deliver(name):
                raise OutboxFullError(f"sink {name!r} lags too far: {reason}", sink=name)
            self._pipeline.clock.sleep(WAIT_SECONDS)
            full = self._find_full(known, self._heads())
        spare = count_spare(options, len(heads))
        for number, (name, reason) in enumerate(full.items()):
            if number >= spare:
                raise OutboxFullError(
                    f"sink {name!r} lags too far, and the quorum needs it: {reason}",
                    hint="Bring the sink back, raise outbox.max_bytes, or lower batch.quorum.",
                    sink=name,
                )
            logger.error("sink is set aside", extra={"sink": name, "reason": reason})
        return full

    def waiting_bytes(self, sink: str, epoch: int) -> int:
        """Return the bytes that wait for a sink which holds `epoch`, as far as this run knows them."""
        head = self._head_name(sink)
        return sum(one.sizes.get(head, 0) for one in list(self._waiting.values()) if one.epoch > epoch)

    def _has_waited(self, sink: str, epoch: int) -> bool:
        """Return whether rows have waited for a sink which holds `epoch` for longer than a delivery usually takes."""
        head, late = self._head_name(sink), self._pipeline.clock.now() - LAG
        return any(
            one.epoch > epoch and one.sizes.get(head) and one.made_at <= late for one in list(self._waiting.values())
        )

    def _head_name(self, sink: str) -> str:
        return next((one.head_name for one in self._pipeline.options.followers if one.name == sink), sink)

    def _find_full(self, known: Mapping[str, KnownSink], seen: Mapping[str, int]) -> dict[str, str]:
        """Return the optional followers for which more waits than may, with the reason; `seen` are their heads."""
        options, filling = self._pipeline.options.outbox, self._filling()
        heads = {name: epoch for name, epoch in newest_seen(known, seen).items() if name not in filling}
        full: dict[str, str] = {}
        lagging: dict[str, int] = {}  # what would be won by giving them up
        for follower in self._pipeline.options.followers:
            if follower.required or follower.name not in heads:
                continue
            waits = self.waiting_bytes(follower.name, heads[follower.name])
            if waits * RESERVE_PARTS > options.reserve or self._has_waited(follower.name, heads[follower.name]):
                lagging[follower.name] = waits
            if waits > options.max_bytes:
                full[follower.name] = f"{waits} bytes wait for it in the outbox, more than {options.max_bytes}"
        slowest = max(lagging, key=lambda name: lagging[name], default="")
        free = _free_bytes(self._pipeline.storage)
        if not full and slowest and free is not None and free < options.reserve:
            full[slowest] = f"{free} bytes are free where the outbox lies, less than {options.reserve}"
        return full

    def _needed_by_sinks(self, listed: dict[str, list[str]]) -> set[str]:
        """Return the listed attempts that some sink still lacks, in the spec or not, and those that a hole hides.

        No sink can need anything below a fold.
        """
        hidden = self._learn({attempt: keys for attempt, keys in listed.items() if attempt not in self._waiting})
        found = {attempt: self._waiting[attempt] for attempt in listed if attempt in self._waiting}
        for one in found.values():
            self._log_spared(one.absent)
        held = self._held()
        return hidden | {attempt for attempt, one in found.items() if self._is_needed(one, held)}

    def _is_needed(self, waiting: _Waiting, held: int) -> bool:
        if waiting.epoch > held or waiting.absent:
            return True
        keeps = any(sink.capabilities.fed_from_outbox for sink in self._pipeline.sinks)
        return keeps and waiting.made_at > self._pipeline.clock.now() - self._pipeline.options.outbox.keep

    def _held(self) -> int:
        """Return the epoch of the sink that lags most, of those that are not being filled."""
        filling = self._filling()
        settled = [settled_epoch(sink) for sink in self._pipeline.sinks[1:]]
        heads = [epoch for name, epoch in self._heads().items() if name not in filling]
        return min([*heads, *(epoch for epoch in settled if epoch is not None)])

    def _learn(self, unknown: dict[str, list[str]]) -> set[str]:
        """Find these attempts on the chain. Returns those that a hole hides."""
        away = find_away(self._progress.head.checkpoint, self._pipeline.options.followers)
        names = {name for sink in self._pipeline.sinks for name in (sink.name, sink.former_name)} | away.keys()
        left = set(unknown) - set(self._progress.epochs)
        try:
            for link in self._pipeline.ledger.chain(self._progress.head.entry) if left else ():
                if isinstance(link, Fold):
                    if link.is_bridge:
                        raise LedgerHoleError(f"ledger entry {link.last.name} is lost", epoch=link.last.epoch)
                    break
                attempt = link.checkpoint.attempt
                if attempt in left:
                    left.remove(attempt)
                    # A follower that is known is in the spec: any other one is forgotten, and needs nothing.
                    absent = sorted(waiting_for(link.staged, unknown[attempt]) - names - link.checkpoint.sinks.keys())
                    self._waiting[attempt] = replace(_waiting(link), absent=tuple(absent))
                if not left:
                    break
        except LedgerHoleError as error:
            logger.warning("outbox not swept behind a hole", extra={"reason": error.message, "attempts": len(left)})
            return left
        return set()

    def _log_spared(self, sinks: Iterable[str]) -> None:
        """Log, once per run, that rows wait for a sink that the spec does not have."""
        for name in sinks:
            if name not in self._spared:
                self._spared.add(name)
                logger.warning("rows wait in the outbox for a sink that the spec does not have", extra={"sink": name})


def count_spare(options: PipelineOptions, sinks: int) -> int:
    """Return how many of so many sinks, the deciding one included, the commit policy can do without."""
    if options.batch.commit_policy != "quorum":
        return sinks
    return max(0, sinks - options.batch.quorum - (options.journal is not None))


def _waiting(entry: LedgerEntry) -> _Waiting:
    known = known_sinks(entry.checkpoint)
    heads = {name: known[name].head_name if name in known else name for name in entry.staged}
    sizes = {heads[name]: sum(int(file["size_bytes"]) for file in files) for name, files in entry.staged.items()}
    return _Waiting(entry.epoch, datetime.fromisoformat(entry.checkpoint.created_at), sizes)


def _free_bytes(storage: Storage) -> int | None:
    """Return the free space of a local disk; None for an object store."""
    return shutil.disk_usage(storage.root).free if isinstance(storage, LocalStorage) else None
