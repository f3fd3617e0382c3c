"""Random operations: every backend answers as the one in memory does."""

from __future__ import annotations

import tempfile
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from firnline.errors import FirnlineError
from firnline.storage import LocalStorage
from firnline.stores.base import CheckpointStore
from firnline.stores.file import FileStore
from firnline.stores.memory import MemoryStore
from firnline.stores.objects import ObjectStore
from firnline.stores.sqlite import SqliteStore

KEYS = st.sampled_from(["a", "a/b", "a-b", "b"])
DATA = st.sampled_from([b"", b"x", b"y", b"\x28\xb5\x2f\xfdz", bytes(range(256))])
NOTES = st.sampled_from(["", "note", "ä: 100 %"])
NUMBERS = st.integers(-1, 12)
OPERATIONS = st.one_of(
    st.tuples(st.just("put_raw"), KEYS, DATA, NOTES),
    st.tuples(st.just("put_raw_versioned"), KEYS, DATA, NUMBERS, NOTES),
    st.tuples(st.just("put_onto_newest"), KEYS, DATA),
    st.tuples(st.just("delete"), KEYS),
    st.tuples(st.just("prune"), KEYS, st.integers(0, 4)),
    st.tuples(st.just("rollback"), KEYS, NUMBERS),
    st.tuples(st.just("get_version_raw"), KEYS, NUMBERS),
    st.tuples(st.just("page"), KEYS, NUMBERS, st.integers(0, 3)),
    st.tuples(st.just("reopen")),
)


def answer(store: CheckpointStore, operation: tuple[Any, ...]) -> object:
    name, *arguments = operation
    try:
        match name:
            case "reopen":
                store.close()
                return None
            case "put_onto_newest":
                key, data = arguments
                return store.put_raw_versioned(key, data, store.latest_version(key))
            case "page":
                key, before, limit = arguments
                return [(i.version, i.size_bytes, i.note) for i in store.list_versions(key, before=before, limit=limit)]
            case _:
                return getattr(store, name)(*arguments)
    except FirnlineError as error:
        return error.code


def everything(store: CheckpointStore) -> object:
    keys = ["a", "a/b", "a-b", "b"]
    return [
        [*store.list()],
        [*store.list("a/")],
        [store.get_raw(key) for key in keys],
        [store.latest_version(key) for key in keys],
        [[(i.version, i.size_bytes, i.note) for i in store.list_versions(key)] for key in keys],
    ]


@settings(max_examples=60)
@given(st.lists(OPERATIONS, max_size=30))
def test_all_backends_answer_alike(operations: list[tuple[Any, ...]]) -> None:
    with tempfile.TemporaryDirectory() as name, ExitStack() as stack:
        folder = Path(name)
        model = MemoryStore()
        stores: list[CheckpointStore] = [
            FileStore(str(folder / "file")),
            SqliteStore(str(folder / "sqlite.db")),
            ObjectStore(LocalStorage(str(folder / "object"))),
        ]
        for store in stores:
            stack.enter_context(closing(store))
            store.open()
        for operation in operations:
            expected = answer(model, operation)
            for store in stores:
                assert answer(store, operation) == expected, (store.kind, operation)
        for store in stores:
            assert everything(store) == everything(model), store.kind
