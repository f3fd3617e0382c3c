"""moto's server as S3, in this process, on 127.0.0.1; one request at a time.

moto looks whether an object exists and then stores it, so two conditional puts at once may both succeed there, which
no real S3 does. One at a time, the condition holds.
"""

from __future__ import annotations

import os
import threading
import urllib.request
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any


@contextmanager
def running_s3(port: int = 0) -> Iterator[str]:
    """The server's address, while it runs; a free port unless one is given."""
    from moto.moto_server.werkzeug_app import DomainDispatcherApplication, create_backend_app
    from werkzeug.serving import make_server

    app = DomainDispatcherApplication(create_backend_app)
    turn = threading.Lock()

    def one_at_a_time(environ: dict[str, Any], start_response: Callable[..., Any]) -> Iterable[bytes]:
        with turn:
            return [b"".join(app(environ, start_response))]

    server = make_server("127.0.0.1", port, one_at_a_time, threaded=True)
    thread = threading.Thread(target=server.serve_forever, name="moto", daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def s3_options(url: str) -> dict[str, str]:
    """The storage options that reach the server at this address."""
    return {
        "AWS_ACCESS_KEY_ID": "test",
        "AWS_SECRET_ACCESS_KEY": "test",
        "AWS_REGION": "us-east-1",
        "AWS_ENDPOINT_URL": url,
        "AWS_ALLOW_HTTP": "true",
    }


def new_bucket(url: str) -> str:
    """Make a bucket, and return its name."""
    name = "b" + os.urandom(6).hex()
    urllib.request.urlopen(urllib.request.Request(f"{url}/{name}", method="PUT")).close()
    return name
