"""The HTTP sink: posts batches of rows, at least once, each with a key by which a receiver recognises a repeat."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from datetime import UTC
from email.utils import parsedate_to_datetime
from functools import cached_property
from typing import ClassVar

from firnline.errors import (
    BadRowError,
    CommitConflictError,
    CommitUnknownError,
    ConfigError,
    FencedError,
    SinkError,
)
from firnline.faults import fault_point
from firnline.http_address import HttpAddress
from firnline.sinks.base import Capabilities, SinkContext
from firnline.sinks.follower import EpochDelivery, Follower, FollowerHead
from firnline.sinks.http.batches import CONTENT_TYPES, Batch, cut_batches, same_batch
from firnline.sinks.http.client import Answer, AnswerLostError, HttpClient, NotSentError
from firnline.sinks.http.options import HttpSinkOptions, find_bad_header
from firnline.sinks.http.progress import Progress, ProgressLog, SendRange
from firnline.types import Delivery

TRIES = 4  # of one request, before the run waits and tries the epoch again
BACKOFF_SECONDS = 0.5
MOST_WAIT_SECONDS = 60.0  # whatever Retry-After says
MOST_REFUSED = 3  # batches in a row, before the receiver is thought to be at fault
AGAIN = (408, 425, 429)  # and 500 and above
REFUSES_BATCH = (400, 413, 422)


class HttpSink(Follower):
    """A URL that takes batches of rows."""

    capabilities: ClassVar[Capabilities] = Capabilities(Delivery.AT_LEAST_ONCE, fed_from_outbox=True, has_columns=False)

    def __init__(self, options: HttpSinkOptions, context: SinkContext) -> None:
        super().__init__(options, context)
        bad = find_bad_header(options.headers)
        if bad is not None:
            raise ConfigError(f"sink {self.name!r}: header {bad[0]!r} {bad[1]}")
        self._settings = options
        self._address = HttpAddress.parse(options.url, allow_http=options.allow_http)
        self._client = HttpClient(
            self._address,
            options.method,
            options.headers,
            hmac_secret=options.hmac,
            ca_file=options.ca_file,
            timeout_secs=options.timeout_secs,
            clock=context.clock,
        )

    @cached_property
    def _log(self) -> ProgressLog:
        return ProgressLog(self.outbox, self.context.pipeline, self.head_name)

    def check(self) -> None:
        try:
            self._client.connect()
        except NotSentError as error:
            raise self._away(error) from error

    def find_caveats(self) -> list[str]:
        return [f"sink {self.name} delivers at least once: its receiver must know repeats by their Idempotency-Key"]

    # -- the head -------------------------------------------------------------------------------------

    def read_head(self) -> FollowerHead | None:
        progress = self._log.load()
        return progress.head if progress is not None else None

    def swap_head(self, expected: FollowerHead | None, new: FollowerHead) -> None:
        progress = self._expect(expected, new.generation)
        if progress is None:
            self._log.append(None, Progress(0, new))
            return
        # A claim keeps the range that a former run may have sent: it is sent again as it was.
        sending = progress.sending if new.epoch == progress.head.epoch else None
        self._log.append(progress, replace(progress, head=new, sending=sending))

    def _expect(self, expected: FollowerHead | None, generation: int) -> Progress | None:
        """Load the progress; its head must be the expected one."""
        progress = self._log.load()
        head = progress.head if progress is not None else None
        if head is not None and head.generation > generation:
            raise FencedError(f"generation {head.generation} took sink {self.name!r} over", generation=head.generation)
        if head != expected:
            raise CommitConflictError(f"sink {self.name!r} holds another head than expected; nothing was written")
        return progress

    # -- delivery -------------------------------------------------------------------------------------

    def deliver(self, delivery: EpochDelivery) -> FollowerHead:
        progress = self._expect(delivery.head, delivery.head.generation)
        assert progress is not None
        for batch in self._batches(delivery, progress):
            if batch.rows:
                progress = self._deliver_batch(delivery, progress, batch)
        final = replace(progress, head=delivery.final_head, sending=None)
        return self._log.append(progress, final).head

    def _batches(self, delivery: EpochDelivery, progress: Progress) -> Iterator[Batch]:
        """Yield what is left of the epoch, first the batch that a former try may have sent."""
        first, sending, event_id = delivery.first_row, progress.sending, bool(delivery.shape["event_id"])
        if sending is not None and sending.entry == delivery.commit.entry and sending.first >= first:
            yield same_batch(delivery.rows, sending.first, sending.last, event_id=event_id)
            first = sending.last + 1
        settings = self._settings
        yield from cut_batches(
            delivery.rows, first, event_id=event_id, max_rows=settings.max_rows, max_bytes=settings.max_bytes
        )

    def _deliver_batch(self, delivery: EpochDelivery, progress: Progress, batch: Batch) -> Progress:
        """Write down what is sent, send it, and return the progress with what the answer says of it."""
        entry, attempt = delivery.commit.entry, delivery.rows.attempt
        sending = SendRange(entry, attempt, batch.first, batch.end - 1)
        if sending != progress.sending:
            before = delivery.partial_head(batch.first) if batch.first > delivery.first_row else delivery.head
            progress = self._log.append(progress, replace(progress, head=before, sending=sending))
        key = f"{delivery.rows.pipeline}/{self.head_name}/{entry.epoch}/{sending.first}-{sending.last}"
        refusal = self._post(delivery, batch, key)
        if refusal is None:
            return replace(progress, refused=0)
        if delivery.dead_letters is not None and progress.refused + 1 >= MOST_REFUSED:
            raise BadRowError(
                f"sink {self.name!r}: {self._address.shown} has refused {MOST_REFUSED} batches in a row; {refusal}",
                hint="Correct the receiver, or the format of the sink; what it refuses now is not set aside any more.",
                sink=self.name,
                epoch=entry.epoch,
            )
        delivery.refuse(batch.letters(refusal))
        return replace(progress, refused=progress.refused + 1)

    def _post(self, delivery: EpochDelivery, batch: Batch, key: str) -> str | None:
        """Send a batch until it is taken or refused; returns why it was refused, or None.

        Raises:
            CommitUnknownError: it was sent, and no answer came, in several tries.
            SinkError: the receiver cannot be reached, or takes nothing now.
        """
        style = str(delivery.shape["format"])
        body = batch.body(style)
        headers = {
            "Content-Type": CONTENT_TYPES[style],
            "Firnline-Epoch": str(delivery.rows.epoch),
            "Firnline-Generation": str(delivery.head.generation),
            "Firnline-Rows": str(batch.rows),
        }
        for number in range(1, TRIES + 1):
            answer: Answer | None = None
            fault_point("http.send.before")
            try:
                answer = self._client.send(body, key, headers)
            except NotSentError as error:
                failure: SinkError = self._away(error)
            except AnswerLostError as error:
                failure = CommitUnknownError(
                    f"sink {self.name!r}: no answer from {self._address.shown}: {error}", sink=self.name
                )
            fault_point("http.send.after")
            if answer is not None:
                if 200 <= answer.status < 300:
                    return None
                if answer.status in REFUSES_BATCH:
                    return f"rows {batch.first} to {batch.end - 1} are refused with {answer.status}: {answer.text}"
                failure = self._refused(answer)
                if answer.status not in AGAIN and answer.status < 500:
                    raise failure
            if number < TRIES:
                self.context.clock.sleep(self._wait_seconds(number, answer))
        raise failure

    def _wait_seconds(self, tries: int, answer: Answer | None) -> float:
        """Return how long to wait before the next try: longer each time, or as long as the receiver asks, in bounds."""
        wait: float = BACKOFF_SECONDS * 2 ** (tries - 1)
        asked = answer.retry_after.strip() if answer is not None else ""
        if asked.isdigit():
            wait = max(wait, float(asked))
        elif asked:
            try:
                until = parsedate_to_datetime(asked)
            except ValueError:
                return wait
            moment = until if until.tzinfo is not None else until.replace(tzinfo=UTC)
            wait = max(wait, (moment - self.context.clock.now()).total_seconds())
        return min(wait, MOST_WAIT_SECONDS)

    def _away(self, error: Exception) -> SinkError:
        return SinkError(
            f"sink {self.name!r}: {self._address.shown} cannot be reached: {error}",
            hint="Check the url, and that the receiver runs; nothing was lost.",
            sink=self.name,
        )

    def _refused(self, answer: Answer) -> SinkError:
        moved = ". It redirects, and Firnline follows no redirect" if 300 <= answer.status < 400 else ""
        hint = "Name the final address in url." if moved else "Check url and headers of the sink, and the receiver."
        return SinkError(
            f"sink {self.name!r}: {self._address.shown} answers {answer.status}: {answer.text}{moved}",
            hint=hint,
            sink=self.name,
            status=answer.status,
        )
