"""Servers that cases need, in processes of their own: moto as S3."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from firnline.clock import monotonic

START_SECONDS = 60.0


@dataclass(frozen=True)
class Bucket:
    """A bucket, and what a client needs to reach it."""

    uri: str
    options: dict[str, str]


@contextmanager
def running_s3() -> Iterator[Bucket]:
    """moto's server with one new bucket. Not in this process: its work would be timed as ours."""
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        port = int(found.getsockname()[1])
    url = f"http://127.0.0.1:{port}"
    command = [sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", str(port)]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        name = f"bench-{os.urandom(6).hex()}"
        _create_bucket(process, f"{url}/{name}")
        options = {
            "AWS_ACCESS_KEY_ID": "bench",
            "AWS_SECRET_ACCESS_KEY": "bench",
            "AWS_REGION": "us-east-1",
            "AWS_ENDPOINT_URL": url,
            "AWS_ALLOW_HTTP": "true",
        }
        yield Bucket(f"s3://{name}", options)
    finally:
        process.terminate()
        process.wait()


def _create_bucket(process: subprocess.Popen[bytes], url: str) -> None:
    deadline = monotonic() + START_SECONDS
    while True:
        try:
            urllib.request.urlopen(urllib.request.Request(url, method="PUT")).close()
            return
        except urllib.error.URLError:
            if process.poll() is not None or monotonic() > deadline:
                raise
            time.sleep(0.05)
