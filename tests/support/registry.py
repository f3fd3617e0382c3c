"""A schema registry for tests: Confluent's HTTP interface in memory, on 127.0.0.1.

Ids are those of schemas, not of subjects; a subject takes only schemas that are compatible (BACKWARD by default).
"""

from __future__ import annotations

import contextlib
import json
import ssl
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import unquote

import fastavro

_PROMOTIONS = {
    ("int", "long"), ("int", "float"), ("int", "double"), ("long", "float"), ("long", "double"), ("float", "double"),
    ("string", "bytes"), ("bytes", "string"),
}  # fmt: skip


class Registry:
    """Schemas by id, versions by subject. `authorization` is the header that every request must have; empty: none."""

    def __init__(self) -> None:
        self.schemas: dict[int, dict[str, Any]] = {}  # id -> what `GET /schemas/ids` answers
        self.subjects: dict[str, list[int]] = {}
        self.compatibility: dict[str, str] = {}
        self.requests: list[tuple[str, str]] = []
        self.authorization = ""
        self.status = 0  # answered instead of anything else, if set
        self.url = ""
        self._lock = threading.Lock()

    def add(self, schema: Any, *, kind: str = "AVRO", references: list[dict[str, Any]] | None = None) -> int:
        """Add a schema without a subject. Returns its id."""
        with self._lock:
            return self._add(json.dumps(schema), kind, references or [])

    def _add(self, text: str, kind: str, references: list[dict[str, Any]]) -> int:
        known = {"schema": text, "schemaType": kind, "references": references}
        number = next((number for number, one in self.schemas.items() if one == known), len(self.schemas) + 1)
        self.schemas[number] = known
        return number

    def register(self, subject: str, schema: Any) -> int:
        """Add a version of a subject, compatible or not. Returns its id."""
        number = self.add(schema)
        self.subjects.setdefault(subject, []).append(number)
        return number

    def versions(self, subject: str) -> list[Any]:
        """Return the schemas of a subject, oldest first."""
        return [json.loads(self.schemas[number]["schema"]) for number in self.subjects.get(subject, [])]

    # -- requests --

    def answer(self, method: str, path: str, body: Any, authorization: str) -> tuple[int, Any]:
        """Answer a request."""
        with self._lock:
            self.requests.append((method, path))
            if self.authorization and authorization != self.authorization:
                return 401, {"error_code": 401, "message": "Unauthorized"}
            if self.status:
                return self.status, {"error_code": self.status, "message": "not now"}
            parts = [unquote(part) for part in path.strip("/").split("/")]
            match (method, *parts):
                case ("GET", "schemas", "types"):
                    return 200, ["AVRO"]
                case ("GET", "schemas", "ids", number):
                    known = self.schemas.get(int(number))
                    return (200, known) if known else (404, {"error_code": 40403, "message": "Schema not found"})
                case ("GET", "subjects", subject, "versions", version):
                    held = self.subjects.get(subject, [])
                    if not 0 < int(version) <= len(held):
                        return 404, {"error_code": 40402, "message": "Version not found."}
                    return 200, {"subject": subject, "version": int(version), **self.schemas[held[int(version) - 1]]}
                case ("POST", "subjects", subject, "versions"):
                    return self._post(subject, body)
        return 404, {"error_code": 404, "message": "HTTP 404 Not Found"}

    def _post(self, subject: str, body: Any) -> tuple[int, Any]:
        text = str(body["schema"])
        try:
            fastavro.parse_schema(json.loads(text))
        except Exception as error:
            return 422, {"error_code": 42201, "message": f"Invalid schema: {error}"}
        held = self.subjects.setdefault(subject, [])
        for number in held:
            if json.loads(self.schemas[number]["schema"]) == json.loads(text):
                return 200, {"id": number}
        if held and self.compatibility.get(subject, "BACKWARD") == "BACKWARD":
            newest = json.loads(self.schemas[held[-1]]["schema"])
            if not can_read(json.loads(text), newest, {}, {}):
                words = f"Schema being registered is incompatible with an earlier schema for subject {subject!r}"
                return 409, {"error_code": 409, "message": words}
        held.append(self._add(text, "AVRO", []))
        return 200, {"id": held[-1]}


def can_read(reader: Any, writer: Any, of_reader: dict[str, Any], of_writer: dict[str, Any]) -> bool:
    """Return whether a reader of one schema can read what was written with another, by the rules of Avro."""
    reader, writer = _named(reader, of_reader), _named(writer, of_writer)
    if isinstance(writer, list):
        return all(can_read(reader, branch, of_reader, of_writer) for branch in writer)
    if isinstance(reader, list):
        return any(can_read(branch, writer, of_reader, of_writer) for branch in reader)
    kinds = tuple(one["type"] if isinstance(one, dict) else one for one in (writer, reader))
    if kinds[0] != kinds[1]:
        return kinds in _PROMOTIONS
    if kinds[0] == "record":
        if reader["name"] != writer["name"]:
            return False
        known = {field["name"]: field["type"] for field in writer["fields"]}
        return all(
            can_read(field["type"], known[field["name"]], of_reader, of_writer)
            if field["name"] in known
            else "default" in field
            for field in reader["fields"]
        )
    if kinds[0] in ("array", "map"):
        key = "items" if kinds[0] == "array" else "values"
        return can_read(reader[key], writer[key], of_reader, of_writer)
    if (
        isinstance(reader, dict)
        and isinstance(writer, dict)
        and "decimal" in (reader.get("logicalType"), writer.get("logicalType"))
    ):
        return all(reader.get(key, 0) == writer.get(key, 0) for key in ("logicalType", "precision", "scale"))
    return True


def _named(schema: Any, known: dict[str, Any]) -> Any:
    if isinstance(schema, dict) and "name" in schema:
        known[schema["name"]] = schema
    return known.get(schema, schema) if isinstance(schema, str) else schema


@contextlib.contextmanager
def running_registry(tls: ssl.SSLContext | None = None) -> Iterator[Registry]:
    """A registry, from nothing to gone."""
    registry = Registry()

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def _handle(self) -> None:
            size = int(self.headers.get("Content-Length") or 0)
            body = json.loads(self.rfile.read(size)) if size else None
            status, answer = registry.answer(self.command, self.path, body, self.headers.get("Authorization", ""))
            data = json.dumps(answer).encode()
            self.send_response(status)
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        do_GET = do_POST = _handle  # noqa: N815

        def log_message(self, *_: Any) -> None:
            """Log nothing."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    if tls is not None:
        server.socket = tls.wrap_socket(server.socket, server_side=True)
    registry.url = f"http{'s' if tls is not None else ''}://127.0.0.1:{server.server_address[1]}"
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield registry
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
