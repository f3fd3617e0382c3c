"""What the service tells those who watch it: changes as server-sent events, and metrics for Prometheus."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import suppress
from typing import Annotated

from fastapi import APIRouter, Header, Request
from fastapi.responses import Response, StreamingResponse
from prometheus_client import CollectorRegistry
from prometheus_client.exposition import choose_encoder

from firnline.service.api.common import Reader, ShownRoute, TheService, disclosure_of
from firnline.service.overview_metrics import OverviewMetrics
from firnline.service.problems import TooManyError

router = APIRouter(tags=["service"], route_class=ShownRoute)


@router.get("/events")
async def listen(
    request: Request,
    service: TheService,
    identity: Reader,
    last_event_id: Annotated[str | None, Header(max_length=64)] = None,
) -> StreamingResponse:
    """Listen to changes of pipelines: `event: pipeline`, with the line of the overview. At most 4 times per token.

    A client that comes back with `Last-Event-ID` gets what it missed, or `event: reset` if that is no longer known. The
    stream ends with the token or session that it was asked with.
    """
    with service.events.admit(identity.name):
        pass  # a refusal must come before the answer begins

    async def stream() -> AsyncIterator[str]:
        with suppress(TooManyError), service.events.admit(identity.name):
            is_valid, show = request.state.is_valid, disclosure_of(request).show
            async for text in service.events.listen(last_event_id, is_valid=is_valid, show=show):
                yield text

    return StreamingResponse(stream(), media_type="text/event-stream", headers={"X-Accel-Buffering": "no"})


@router.get("/metrics")
def metrics(request: Request, service: TheService, _: Reader) -> Response:
    """Metrics of the service, for Prometheus: every pipeline as the overview has it."""
    registry = CollectorRegistry()
    registry.register(OverviewMetrics(service.supervisor.all, service.clock))
    encode, media_type = choose_encoder(request.headers.get("accept", ""))
    return Response(encode(registry), media_type=media_type)
