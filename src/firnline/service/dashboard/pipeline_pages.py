"""Pages about one pipeline: its graph, its past, its runs, and what operators can do with it."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import asdict, dataclass
from datetime import datetime
from functools import partial
from typing import Annotated, Any, Literal, cast
from urllib.parse import parse_qs, urlencode

from fastapi import APIRouter, Query, Request
from fastapi import Path as PathParameter
from fastapi.concurrency import run_in_threadpool
from fastapi.responses import HTMLResponse, JSONResponse, RedirectResponse, Response

from firnline.errors import FirnlineError
from firnline.graph import graph_of
from firnline.history.flow import load_flow
from firnline.history.state import input_watermarks, load_shards, snapshots_of
from firnline.run.observer import took_ms
from firnline.run.trend import KEPT_DAYS
from firnline.service.access.disclosure import message_text
from firnline.service.access.tokens import Identity
from firnline.service.answers import AnswerRoute, kept
from firnline.service.api import history, work
from firnline.service.api.common import Name, Reader, Service, TheService, needs
from firnline.service.api.paging import DEFAULT_LIMIT, After
from firnline.service.api.trend import Days, show_trend
from firnline.service.dashboard.actions import ACTIONS, find_offered
from firnline.service.dashboard.drawings import NODE_HEIGHT, NODE_WIDTH, STEPS, bars, draw
from firnline.service.dashboard.readings import FRESH_SECONDS, Readings
from firnline.service.dashboard.render import page
from firnline.service.problems import ConflictError, NotFoundError
from firnline.service.rates import find_rates
from firnline.service.supervise.policy import code_text, is_restarted
from firnline.service.views import summary
from firnline.types import Json

router = APIRouter(prefix="/p/{name}", include_in_schema=False, route_class=AnswerRoute)

TABS = (
    ("", "Overview"),
    ("epochs", "Epochs"),
    ("trend", "Trend"),
    ("checkpoints", "Checkpoints"),
    ("sources", "Sources"),
    ("sinks", "Sinks"),
    ("files", "Files"),
    ("quarantine", "Quarantine"),
    ("dead-letters", "Dead letters"),
    ("schemas", "Schemas"),
    ("state", "State"),
    ("savepoints", "Savepoints"),
    ("runs", "Runs"),
    ("audit", "Audit"),
    ("spec", "Spec"),
)
SLOW_SECONDS = 15.0  # readings that list input, ask servers or read many epochs
TIMELINE_EPOCHS, CHART_EPOCHS = 40, 300
RECORD_MOST_MS = 60_000  # a checkpoint that was recorded later was recorded by another run
LOG_BYTES = 128 * 1024
RAW_BYTES = 2000  # of a bad record

Launch = Annotated[str, PathParameter(pattern=r"^[0-9A-Za-z-]{1,80}$")]
Text = Annotated[str, Query(max_length=200)]


@dataclass(frozen=True, slots=True)
class _Asked:
    """A request for a page about one pipeline."""

    request: Request
    service: Service
    name: str
    identity: Identity

    def read(self, what: tuple[object, ...], load: Callable[[], Any], fresh_seconds: float = FRESH_SECONDS) -> Any:
        readings = cast("Readings", self.request.app.state.readings)
        return readings.get((self.name, *what), load, fresh_seconds)

    def show(self, part: str, load: Callable[[], Any] | None, *key: object, **values: Any) -> HTMLResponse:
        """Return a page with what `load` read; if that fails, a page that says why."""
        service, now = self.service, self.service.clock.now()
        seen = service.supervisor.get(self.name)
        row = summary(seen, now)
        reading, problem = None, None
        slow = SLOW_SECONDS if part in ("overview", "sources", "sinks", "files", "schemas") else FRESH_SECONDS
        try:
            reading = self.read((part, *key), load, slow) if load is not None else None
        except FirnlineError as error:
            problem = message_text(error.code, error.message, self.identity)
        except OSError as error:
            problem = f"cannot be read: {error.strerror or error}"
        did = self.request.query_params.get("did", "")
        return page(
            self.request,
            "pipeline_overview.html" if part == "overview" else f"{part.replace('-', '_')}.html",
            name=self.name,
            row=row,
            rates=find_rates(seen.samples),
            tabs=TABS,
            part="" if part == "overview" else part,
            path=seen.registered.path.name,
            offered=find_offered(str(row["state"]), row["wanted"], self.identity),
            did=ACTIONS.get(did),
            live=self.request.url.path + (f"?{query}" if (query := _without_did(self.request)) else ""),
            found=reading.value if reading else None,
            read_at=reading.read_at if reading else None,
            problem=problem,
            **values,
        )


def _without_did(request: Request) -> str:
    return urlencode([(key, value) for key, value in request.query_params.multi_items() if key != "did"])


@router.get("")
@kept
def overview(request: Request, service: TheService, name: Name, identity: Reader) -> HTMLResponse:
    """Show the graph with rates and heads, and the newest epochs."""

    def load() -> dict[str, Any]:
        pipeline = service.open(name)
        checkpoint = pipeline.load().checkpoint
        return {
            "drawing": draw(graph_of(pipeline.options)),
            "flow": load_flow(pipeline, service.clock.now()),
            "sources": {one["name"]: one for one in history.list_sources(service, name, identity)["sources"]},
            "sinks": {one["name"]: one for one in history.list_sinks(service, name, identity)["sinks"]},
            "operators": {one.operator: one for one in snapshots_of(checkpoint)},
            "timeline": _timeline(history.list_epochs(service, name, identity, 12, None)["epochs"]),
        }

    asked = _Asked(request, service, name, identity)
    return asked.show("overview", load, steps=STEPS, node_width=NODE_WIDTH, node_height=NODE_HEIGHT)


@router.get("/epochs")
@kept
def epochs(request: Request, service: TheService, name: Name, identity: Reader, after: After = None) -> HTMLResponse:
    """Show how long each step of the newest epochs took."""

    def load() -> dict[str, Any]:
        found = history.list_epochs(service, name, identity, TIMELINE_EPOCHS, after)
        return {"timeline": _timeline(found["epochs"]), "next": found["next"]}

    return _Asked(request, service, name, identity).show("epochs", load, after, steps=STEPS, after=after)


def _timeline(rows: list[dict[str, Json]]) -> list[dict[str, Any]]:
    """Add the bars of the steps to epochs."""
    timed = [{**row, "durations_ms": _with_record(row)} for row in rows]
    longest = max((took_ms(row["durations_ms"]) for row in timed), default=0)
    return [
        {**row, "took_ms": took_ms(row["durations_ms"]), "bars": bars(row["durations_ms"], longest)} for row in timed
    ]


def _with_record(row: dict[str, Json]) -> dict[str, int]:
    """Return the durations with `record`: from the end of the commit until the checkpoint was recorded."""
    steps: dict[str, int] = dict(row["durations_ms"])
    if row["recorded_at"] is None or "commit" not in steps:
        return steps
    made, recorded = (datetime.fromisoformat(str(row[key])) for key in ("created_at", "recorded_at"))
    took = round((recorded - made).total_seconds() * 1000) - steps.get("stage", 0) - steps["commit"]
    return {**steps, "record": took} if 0 < took < RECORD_MOST_MS else steps


@router.get("/epochs/chart")
@kept
def chart(request: Request, service: TheService, name: Name, identity: Reader) -> JSONResponse:
    """Return rows and durations of the newest epochs, oldest first, for the charts."""
    reading = _Asked(request, service, name, identity).read(
        ("chart",), lambda: history.list_epochs(service, name, identity, CHART_EPOCHS, None)["epochs"], SLOW_SECONDS
    )
    rows = list(reversed(reading.value))
    durations = [_with_record(row) for row in rows]
    steps = [
        {"label": step, "colour": f"--{step}", "values": [one.get(step, 0) / 1000 for one in durations]}
        for step in STEPS
        if any(one.get(step) for one in durations)
    ]
    counted = [{"label": "rows", "colour": "--main", "values": [row["rows"] for row in rows]}]
    return JSONResponse(
        {
            "read_at": reading.read_at,
            "at": [datetime.fromisoformat(str(row["created_at"])).timestamp() for row in rows],
            "charts": [{"id": "rows", "series": counted}, {"id": "seconds", "series": steps}],
        }
    )


@router.get("/trend")
@kept
def trend(request: Request, service: TheService, name: Name, identity: Reader, days: Days = 1) -> HTMLResponse:
    """Show rows, lag and durations of the last days, whichever runs they are of."""

    def load() -> dict[str, Json]:
        return show_trend(service, name, identity, days)

    return _Asked(request, service, name, identity).show("trend", load, days, days=days, choices=(1, 7, KEPT_DAYS))


@router.get("/trend/chart")
@kept
def trend_chart(request: Request, service: TheService, name: Name, identity: Reader, days: Days = 1) -> JSONResponse:
    """Return the points of the trend for the charts."""
    asked = _Asked(request, service, name, identity)
    reading = asked.read(("trend", days), lambda: show_trend(service, name, identity, days))
    points, seconds = reading.value["points"], reading.value["minutes"] * 60
    steps = [step for step in STEPS if any(step in one["durations_ms"] for one in points)]

    def series(label: str, colour: str, of: Callable[[dict[str, Json]], Json]) -> dict[str, Json]:
        return {"label": label, "colour": colour, "values": [of(one) for one in points]}

    charts = {
        "rows": [series("rows/s", "--main", lambda one: one["rows"] / seconds)],
        "lag": [
            series("lag, mean (s)", "--main", lambda one: one["lag_seconds"]),
            series("lag, highest (s)", "--warn", lambda one: one["lag_seconds_max"]),
        ],
        "seconds": [series(f"{step} (s)", f"--{step}", partial(_step_seconds, step)) for step in steps],
        "trouble": [
            series("bad records", "--warn", lambda one: one["quarantined"]),
            series("restarts", "--bad", lambda one: one["restarts"]),
        ],
    }
    return JSONResponse(
        {
            "read_at": reading.read_at,
            "range": [datetime.fromisoformat(str(reading.value[end])).timestamp() for end in ("since", "until")],
            "at": [datetime.fromisoformat(str(one["start"])).timestamp() for one in points],
            "charts": [{"id": name, "series": series} for name, series in charts.items()],
        }
    )


def _step_seconds(step: str, point: dict[str, Any]) -> float:
    return float(point["durations_ms"].get(step, 0)) / 1000


@router.get("/checkpoints")
@kept
def checkpoints(
    request: Request, service: TheService, name: Name, identity: Reader, after: After = None
) -> HTMLResponse:
    """List checkpoints with Flink's columns."""
    asked = _Asked(request, service, name, identity)

    def load() -> dict[str, Json]:
        return history.list_checkpoints(service, name, identity, DEFAULT_LIMIT, after)

    return asked.show("checkpoints", load, after, after=after)


@router.get("/checkpoints/{epoch}")
@kept
def checkpoint(
    request: Request, service: TheService, name: Name, epoch: history.Epoch, identity: Reader
) -> HTMLResponse:
    """Show one checkpoint: positions, sinks, state and copies."""
    asked = _Asked(request, service, name, identity)
    return asked.show(
        "checkpoint",
        lambda: history.show_checkpoint(service, name, epoch, identity),
        epoch,
        epoch=epoch,
    )


@router.get("/sources")
@kept
def sources(request: Request, service: TheService, name: Name, identity: Reader) -> HTMLResponse:
    """Show each source: position, backlog, the log that it reads, and how operators see its event time."""

    def load() -> dict[str, Any]:
        pipeline = service.open(name)
        marks = input_watermarks(pipeline.load().checkpoint)
        return {**history.list_sources(service, name, identity), "watermarks": marks}

    return _Asked(request, service, name, identity).show("sources", load, align_ms=_align_ms(service, name))


def _align_ms(service: Service, name: str) -> Json:
    glance = service.supervisor.get(name).glance
    return glance.run.get("align_ms") if glance is not None and glance.run is not None else None


@router.get("/sinks")
@kept
def sinks(request: Request, service: TheService, name: Name, identity: Reader) -> HTMLResponse:
    """Show how far each sink is behind, and why."""
    asked = _Asked(request, service, name, identity)
    return asked.show("sinks", lambda: history.list_sinks(service, name, identity))


@router.get("/files")
@kept
def files(
    request: Request, service: TheService, name: Name, identity: Reader, status: Text = "", after: After = None
) -> HTMLResponse:
    """List files with their status."""
    asked = _Asked(request, service, name, identity)

    def load() -> dict[str, Json]:
        return history.list_files(service, name, identity, status or None, DEFAULT_LIMIT, after)

    return asked.show("files", load, status, after, status=status, after=after)


@router.get("/quarantine")
@kept
def quarantine(
    request: Request, service: TheService, name: Name, identity: Reader, reason: Text = "", after: After = None
) -> HTMLResponse:
    """List records that could not be decoded; without the right `data`, how many there are by reason."""
    asked = _Asked(request, service, name, identity)

    def load() -> dict[str, Json]:
        return history.list_quarantine(service, name, identity, reason or None, DEFAULT_LIMIT, after)

    return asked.show("quarantine", load, identity.data, reason, after, reason=reason, after=after, raw_bytes=RAW_BYTES)


@router.get("/dead-letters")
@kept
def dead_letters(
    request: Request, service: TheService, name: Name, identity: Reader, sink: Text = "", after: After = None
) -> HTMLResponse:
    """List rows that a sink refused."""
    asked = _Asked(request, service, name, identity)

    def load() -> dict[str, Json]:
        return history.list_dead_letters(service, name, identity, sink or None, DEFAULT_LIMIT, after)

    return asked.show("dead-letters", load, identity.data, sink, after, sink=sink, after=after)


@router.get("/schemas")
@kept
def schemas(request: Request, service: TheService, name: Name, identity: Reader, after: After = None) -> HTMLResponse:
    """Show the schemas that captured tables had and what changed, and the columns that epochs added."""

    def load() -> dict[str, Json]:
        return history.list_schemas(service, name, identity, None, DEFAULT_LIMIT, after)

    return _Asked(request, service, name, identity).show("schemas", load, after, after=after)


@router.get("/state")
@kept
def state(request: Request, service: TheService, name: Name, identity: Reader) -> HTMLResponse:
    """Show the state of each operator, shard by shard."""

    def load() -> dict[str, Any]:
        pipeline = service.open(name)
        checkpoint = pipeline.load().checkpoint
        shards = load_shards(pipeline, checkpoint)
        return {"operators": [_with_skew(asdict(one), shards[one.operator]) for one in snapshots_of(checkpoint)]}

    return _Asked(request, service, name, identity).show("state", load)


def _with_skew(row: dict[str, Any], shards: list[Any]) -> dict[str, Any]:
    """Add the shards of an operator; `skew`: how many times the mean the largest of them holds."""
    largest = max((one.rows for one in shards), default=0)
    mean = sum(one.rows for one in shards) / len(shards) if shards else 0
    return {**row, "sizes": shards, "largest": largest, "skew": largest / mean if mean else None}


@router.get("/savepoints")
@kept
def savepoints(request: Request, service: TheService, name: Name, identity: Reader) -> HTMLResponse:
    """List the savepoints."""
    asked = _Asked(request, service, name, identity)

    def load() -> dict[str, Any]:
        jobs = [job for job in work.list_jobs(service, name, identity)["jobs"] if job["kind"] == "savepoint"]
        return {**history.show_savepoints(service, name, identity), "jobs": jobs[:5]}

    return asked.show("savepoints", load)


@router.get("/runs")
@kept
def runs(request: Request, service: TheService, name: Name, identity: Reader) -> HTMLResponse:
    """Show the runs with their errors and restarts, and the launches of the service."""

    def load() -> dict[str, Any]:
        found = history.list_runs(service, name, identity)
        return {**found, "launches": [_with_words(one) for one in found["launches"]]}

    return _Asked(request, service, name, identity).show("runs", load)


def _with_words(launch: dict[str, Json]) -> dict[str, Json]:
    if launch["alive"]:
        return {**launch, "words": None, "restarted": None}
    code = launch["exit_code"]
    return {**launch, "words": code_text(code), "restarted": code != 0 and is_restarted(code)}


@router.get("/launches/{launch}")
def log(request: Request, service: TheService, name: Name, launch: Launch, _: Reader) -> HTMLResponse:
    """Show the end of the output of a launch."""
    identity = needs("read", data=True)(request)

    def load() -> dict[str, Any]:
        path = service.supervisor.log_path(name, launch)
        if path is None:
            raise NotFoundError("there is no such launch", hint="The newest 20 launches are kept.")
        return _tail(path)

    return _Asked(request, service, name, identity).show("log", load, launch, launch=launch)


def _tail(path: str) -> dict[str, Any]:
    try:
        with open(path, "rb") as file:
            size = file.seek(0, os.SEEK_END)
            file.seek(max(0, size - LOG_BYTES))
            data = file.read(LOG_BYTES)
    except FileNotFoundError:
        return {"text": "", "size": 0, "skipped": 0}
    skipped = size - len(data)
    if skipped:
        data = data[data.find(b"\n") + 1 :]
    text = data.decode("utf-8", "replace")
    shown = "".join(one if one.isprintable() or one in "\n\t" else "\N{REPLACEMENT CHARACTER}" for one in text)
    return {"text": shown, "size": size, "skipped": size - len(data)}


@router.get("/audit")
@kept
def audit(request: Request, service: TheService, name: Name, identity: Reader, after: After = None) -> HTMLResponse:
    """Show who changed the history of the pipeline."""
    asked = _Asked(request, service, name, identity)

    def load() -> dict[str, Json]:
        unfinished = work.list_unfinished(service, name, identity)["unfinished"]
        return {**history.list_audit(service, name, identity, DEFAULT_LIMIT, after), "unfinished": unfinished}

    return asked.show("audit", load, after, after=after)


@router.get("/spec")
@kept
def spec(request: Request, service: TheService, name: Name, identity: Reader) -> HTMLResponse:
    """Show the spec with its defaults, secrets masked."""
    asked = _Asked(request, service, name, identity)
    return asked.show("spec", lambda: work.get_spec(service, name, identity))


# -- actions ----------------------------------------------------------------------------------------------

ActionName = Literal["start", "pause", "resume", "stop", "checkpoint"]


@router.get("/act/{action}")
def plan(request: Request, service: TheService, name: Name, action: ActionName) -> HTMLResponse:
    """Show what an action will do, and ask for the click that does it."""
    chosen = ACTIONS[action]
    needs(chosen.role)(request)
    seen = service.supervisor.get(name)
    row = summary(seen, service.clock.now())
    return page(
        request,
        "plan.html",
        name=name,
        action=action,
        chosen=chosen,
        row=row,
        is_offered=chosen.offered(str(row["state"]), row["wanted"]),
        effects=chosen.effects(seen),
        command_line=chosen.command_line(seen),
    )


@router.post("/act/{action}")
async def act(request: Request, service: TheService, name: Name, action: ActionName) -> Response:
    """Do it: the form must name the pipeline."""
    chosen = ACTIONS[action]
    identity = needs(chosen.role)(request)
    form = parse_qs((await request.body()).decode("utf-8", "replace"))
    if form.get("pipeline") != [name]:
        raise ConflictError("the form names another pipeline", hint="Load the page again.")
    await run_in_threadpool(chosen.act, service, name, identity)
    there = f"/p/{name}?did={action}"
    if "hx-request" in request.headers:
        return Response(status_code=204, headers={"HX-Redirect": there})
    return RedirectResponse(there, 303)
