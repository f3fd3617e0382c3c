"""The files that pages load: read once, and served under a URL that names their content, so that browsers keep them."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from functools import cache
from importlib import resources

from fastapi import APIRouter
from fastapi.responses import Response

from firnline.service.problems import NotFoundError

TYPES = {
    "css": "text/css; charset=utf-8",
    "js": "text/javascript; charset=utf-8",
    "svg": "image/svg+xml",
    "txt": "text/plain; charset=utf-8",
}
KEPT = "public, max-age=31536000, immutable"

router = APIRouter(include_in_schema=False)


@dataclass(frozen=True, slots=True)
class StaticFile:
    """A file of the package."""

    content: bytes
    hash: str
    type: str


@cache
def load_files() -> dict[str, StaticFile]:
    """Return the files by name."""
    found = {}
    for file in resources.files(__package__).joinpath("static").iterdir():
        content = file.read_bytes()
        kind = TYPES[file.name.rpartition(".")[2]]
        found[file.name] = StaticFile(content, hashlib.sha256(content).hexdigest()[:16], kind)
    return found


def static_url(name: str) -> str:
    """Return the URL of a file; another content has another one."""
    return f"/static/{load_files()[name].hash}/{name}"


@router.get("/static/{content_hash}/{name}")
def static(content_hash: str, name: str) -> Response:
    """Serve one file."""
    file = load_files().get(name)
    if file is None or file.hash != content_hash:
        raise NotFoundError("there is no such file")
    return Response(file.content, media_type=file.type, headers={"Cache-Control": KEPT})
