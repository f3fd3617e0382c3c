"""The trend of a pipeline: durations, rows and lag of the last days."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Query

from firnline.history.trend import load_trend
from firnline.run.trend import KEPT_DAYS
from firnline.service.answers import kept
from firnline.service.api.common import ApiRoute, Name, Reader, TheService
from firnline.types import Json

router = APIRouter(prefix="/pipelines/{name}", tags=["history"], route_class=ApiRoute)

Days = Annotated[int, Query(ge=1, le=KEPT_DAYS, description="How many days to look back.")]


@router.get("/trend")
@kept
def show_trend(service: TheService, name: Name, _: Reader, days: Days = 1) -> dict[str, Json]:
    """Show durations, rows and lag of the last days, rolled up."""
    trend = load_trend(service.open(name).storage, name, service.clock.now(), days)
    return {"pipeline": name, "days": days, **trend.to_json()}
