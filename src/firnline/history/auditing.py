"""Writes an audit record for every change of a pipeline's history, if the pipeline has a checkpoint store."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from firnline.errors import SinkError
from firnline.history.store import open_for_writing
from firnline.options import PipelineOptions
from firnline.run.open_pipeline import OpenPipeline, open_pipeline
from firnline.stores.audit import audited, make_record
from firnline.types import Json


@contextlib.contextmanager
def on_record(
    pipeline: OpenPipeline, what: str, run: str, *, from_epoch: int | None, to_epoch: int | None, **details: Json
) -> Iterator[dict[str, Json]]:
    """Record the start and the end of an action; the caller puts details into the yielded mapping.

    Raises:
        SinkError: the trail cannot be written; then nothing is done.
    """
    options = pipeline.options.checkpoint.store
    if options is None or options.type == "memory":
        yield {}
        return
    begun = make_record(
        pipeline.options.name,
        what,
        run=run,
        from_epoch=from_epoch,
        to_epoch=to_epoch,
        details=details,
        clock=pipeline.clock,
    )
    with contextlib.ExitStack() as stack:
        try:
            store = stack.enter_context(contextlib.closing(open_for_writing(pipeline)))
            found = stack.enter_context(audited(store, begun, pipeline.clock))
        except OSError as error:
            raise SinkError(
                f"the audit trail cannot be written: {error}",
                hint="Make the checkpoint store reachable, then try again; nothing was changed.",
            ) from error
        yield found


@contextlib.contextmanager
def deletion_on_record(options: PipelineOptions | None, what: str, **details: Json) -> Iterator[dict[str, Json]]:
    """Record a deletion; without a pipeline there is no audit trail to write to.

    Raises:
        SinkError: the trail cannot be written; then nothing is deleted.
    """
    if options is None:
        yield {}
        return
    with on_record(open_pipeline(options), what, "", from_epoch=None, to_epoch=None, **details) as found:
        yield found
