"""Puts what somebody does to a pipeline's history on record, where the pipeline has a store to keep it."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from firnline.checkpoint.audit import audited, make_record
from firnline.engine.parts import Parts
from firnline.errors import SinkError
from firnline.history.recorded import open_for_writing
from firnline.types import Json


@contextlib.contextmanager
def on_record(
    parts: Parts, what: str, run: str, *, from_epoch: int | None, to_epoch: int | None, **details: Json
) -> Iterator[None]:
    """Write down what begins, do it, write down how it ended.

    Raises:
        SinkError: the trail cannot be written; then nothing is done.
    """
    options = parts.options.checkpoint.store
    if options is None or options.type == "memory":
        yield
        return
    begun = make_record(
        parts.options.name, what, run=run, from_epoch=from_epoch, to_epoch=to_epoch, details=details, clock=parts.clock
    )
    with contextlib.ExitStack() as stack:
        try:
            store = stack.enter_context(contextlib.closing(open_for_writing(parts)))
            stack.enter_context(audited(store, begun, parts.clock))
        except OSError as error:
            raise SinkError(
                f"the audit trail cannot be written: {error}",
                hint="Make the checkpoint store reachable, then try again; nothing was changed.",
            ) from error
        yield
