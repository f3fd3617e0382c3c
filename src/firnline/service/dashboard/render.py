"""Renders pages: the templates, the words that they use, and the headers of a page."""

from __future__ import annotations

import json
from collections.abc import Mapping
from datetime import datetime
from typing import Any

from fastapi import Request
from fastapi.responses import HTMLResponse
from jinja2 import Environment, PackageLoader, StrictUndefined

from firnline import __version__
from firnline.service.api.common import disclosure_of, service_of
from firnline.service.dashboard import drawings, words
from firnline.service.dashboard.static import static_url

LINKS = frozenset(("live", "there", "link"))  # values that are addresses of pages
STALE_SECONDS = 30.0  # figures that are older are grey

# What htmx may do: no styles or scripts of its own, no eval, no copies of pages, and no request to another host.
HTMX = json.dumps(
    {
        "includeIndicatorStyles": False,
        "allowEval": False,
        "allowScriptTags": False,
        "historyCacheSize": 0,
        "refreshOnHistoryMiss": True,
        "selfRequestsOnly": True,
        "timeout": 30000,
        "scrollBehavior": "auto",
        "defaultSettleDelay": 0,  # what is new on a page works at once
    }
)

_environment = Environment(
    loader=PackageLoader("firnline.service.dashboard"),
    autoescape=True,
    undefined=StrictUndefined,
    trim_blocks=True,
    lstrip_blocks=True,
)
_environment.filters.update(
    count=words.count,
    size=words.size,
    duration=words.duration,
    milliseconds=words.milliseconds,
    moment=words.moment_text,
    tone=words.tone,
    raw_text=words.raw_text,
    json_text=words.json_text,
    json_lines=words.json_lines,
)
_environment.globals.update(
    static=static_url,
    htmx_config=HTMX,
    version=__version__,
    ago=words.ago,
    absent=words.ABSENT,
    spark=drawings.spark,
    stale_seconds=int(STALE_SECONDS),
)


def prepare() -> None:
    """Compile the templates of the overview, so that the first one who opens it does not wait for that."""
    for name in ("base.html", "parts.html", "overview.html"):
        _environment.get_template(name)


def is_stale(read_at: str | None, now: datetime) -> bool:
    """Whether figures of this time are too old to be trusted."""
    return read_at is None or (now - datetime.fromisoformat(read_at)).total_seconds() > STALE_SECONDS


def _tokens_problem(request: Request) -> str | None:
    """Return what is wrong with the file of tokens, for those who are let in; the log has the same."""
    identity = getattr(request.state, "identity", None)
    problem = service_of(request).tokens.problem if identity is not None else None
    return disclosure_of(request).text(problem) if problem is not None else None


def page(request: Request, template: str, status: int = 200, /, **values: Any) -> HTMLResponse:
    """Return a page with what the one who asks may see; who that is, and the time, are known to every template."""
    now = service_of(request).clock.now()
    disclosure = disclosure_of(request)
    shown = (
        values
        if disclosure.sees_all
        else {**disclosure.show(values), **{one: values[one] for one in LINKS & values.keys()}}
    )
    facts: Mapping[str, Any] = {
        "now": now,
        "now_text": now.isoformat(timespec="seconds"),
        "identity": getattr(request.state, "identity", None),
        "is_stale": lambda read_at: is_stale(read_at, now),
        "at": request.url.path,
        "tokens_problem": _tokens_problem(request),
        **shown,
    }
    text = _environment.get_template(template).render(facts)
    # Forms of this page must be able to say where they come from.
    return HTMLResponse(text, status, headers={"Referrer-Policy": "same-origin", "Vary": "HX-Request"})
