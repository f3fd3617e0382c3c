"""Copies many files between two storages: streams, a few at a time, with checksums."""

from __future__ import annotations

import contextlib
import hashlib
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_EXCEPTION, Future, ThreadPoolExecutor, wait
from typing import TypeAlias, TypeVar

from firnline.storage import Storage

CHUNK_BYTES = 4 * 1024 * 1024
COPIERS = 4

Progress: TypeAlias = Callable[[str, int, int], None]  # the activity, the bytes done, the total bytes
J = TypeVar("J")
R = TypeVar("R")


def copy_file(source: Storage, key: str, target: Storage, to: str) -> tuple[int, str]:
    """Copy one file to an unused name. Returns its size and SHA-256. A failure leaves nothing behind."""
    digest, size = hashlib.sha256(), 0
    reader = source.open_read(key)
    try:
        writer = target.create(to)
        try:
            while data := reader.read(CHUNK_BYTES):
                digest.update(data)
                size += len(data)
                writer.write(data)
            writer.close()
        except BaseException:
            with contextlib.suppress(OSError):
                writer.close()
            with contextlib.suppress(OSError):
                target.delete(to)
            raise
    finally:
        reader.close()
    return size, digest.hexdigest()


def sha256_of(storage: Storage, key: str) -> str:
    """Return the SHA-256 of a file."""
    digest = hashlib.sha256()
    reader = storage.open_read(key)
    try:
        while data := reader.read(CHUNK_BYTES):
            digest.update(data)
    finally:
        reader.close()
    return digest.hexdigest()


def each(
    what: str,
    jobs: Sequence[J],
    work: Callable[[J], R],
    size_of: Callable[[J], int],
    progress: Progress | None,
    stopping: Callable[[], bool] = lambda: False,
) -> list[R]:
    """Run every job, a few at a time, and report the finished bytes. The first failure ends it.

    An interrupt also ends it: started jobs finish, no other starts.

    Raises:
        KeyboardInterrupt: also if `stopping` returns True before a job starts.
    """
    total = sum(size_of(job) for job in jobs)
    done = 0
    lock = threading.Lock()
    failed = threading.Event()

    def perform(job: J) -> R | None:
        nonlocal done
        if failed.is_set():
            return None
        try:
            if stopping():
                raise KeyboardInterrupt
            found = work(job)
        except BaseException:
            failed.set()
            raise
        with lock:
            done += size_of(job)
            if progress is not None:
                progress(what, done, total)
        return found

    futures: list[Future[R | None]] = []
    with ThreadPoolExecutor(COPIERS) as pool:
        try:
            futures += [pool.submit(perform, job) for job in jobs]
            wait(futures, return_when=FIRST_EXCEPTION)
        except BaseException:
            failed.set()
            pool.shutdown(wait=False, cancel_futures=True)
            raise
    errors = [error for future in futures if (error := future.exception()) is not None]
    if errors:
        raise errors[0]
    return [found for future in futures if (found := future.result()) is not None]
