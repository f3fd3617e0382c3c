"""The object store on S3, by moto's server: conformance, requests, put-if-absent."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from typing import Any

import obstore
import pytest

from firnline.errors import StoreUnsafeError
from firnline.options import StoreOptions
from firnline.storage import ObjectStorage
from firnline.stores import open_store
from firnline.stores.base import CheckpointStore
from firnline.stores.objects import ObjectStore
from firnline.testing.stores import StoreConformance
from tests.support.s3 import new_bucket, s3_options

pytestmark = pytest.mark.s3


@pytest.fixture
def options(s3: str) -> StoreOptions:
    """A new bucket for each test."""
    return StoreOptions(type="object", uri=f"s3://{new_bucket(s3)}/deep/er", storage_options=s3_options(s3))


@pytest.fixture
def store(options: StoreOptions) -> Iterator[CheckpointStore]:
    with closing(open_store(options)) as store:
        yield store


class TestS3(StoreConformance):
    increments = 3  # each takes several requests, and the server is one Python process


def test_nothing_is_left_of_the_probe(store: CheckpointStore) -> None:
    assert isinstance(store, ObjectStore)
    assert [*store._storage.list("")] == []


def test_a_server_without_put_if_absent_is_refused(options: StoreOptions, monkeypatch: pytest.MonkeyPatch) -> None:
    put = obstore.put

    def careless(store: Any, path: str, file: Any, **settings: Any) -> Any:
        settings.pop("mode", None)
        return put(store, path, file, **settings)

    monkeypatch.setattr(obstore, "put", careless)
    with pytest.raises(StoreUnsafeError):
        open_store(options)


def test_a_server_that_cannot_be_reached_is_an_os_error(options: StoreOptions) -> None:
    down = {**options.storage_options, "AWS_ENDPOINT_URL": "http://127.0.0.1:9", "timeout": "1s"}
    storage = ObjectStorage(options.uri, {**down, "connect_timeout": "1s"})
    with pytest.raises(OSError):
        ObjectStore(storage).open()
