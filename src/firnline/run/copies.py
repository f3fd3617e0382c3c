"""Makes the places where a pipeline's checkpoints are copied to: the store and the two tiers. Nothing is opened yet."""

from __future__ import annotations

from firnline.options import PipelineOptions, StoreOptions
from firnline.stores.base import CheckpointStore
from firnline.stores.tiers import Path, Place

LOCAL_VERSIONS = 10
REMOTE_VERSIONS = 100


def open_places(options: PipelineOptions) -> tuple[Place | None, Place | None, Place | None]:
    """Store, local tier and remote tier, where the options name them."""
    store, near, far = options.checkpoint.store, options.checkpoint.local, options.checkpoint.remote
    local = remote = None
    if near is not None:
        wanted = StoreOptions(type="file", path=near.path, keep_versions=LOCAL_VERSIONS)
        local = _place("local", wanted, options)
    if far is not None:
        wanted = StoreOptions(
            type="object", uri=far.uri, storage_options=far.storage_options, keep_versions=REMOTE_VERSIONS
        )
        remote = _place("remote", wanted, options)
    return _place("store", store, options) if store else None, local, remote


def _place(path: Path, options: StoreOptions, pipeline: PipelineOptions) -> Place:
    held_by = pipeline.deciding.name

    def open_it() -> CheckpointStore:
        from firnline.stores import open_store  # each kind brings its own libraries

        return open_store(options, held_by=held_by)

    def look_at_it() -> CheckpointStore:
        from firnline.stores import open_store

        return open_store(options, held_by=held_by, looking=True)

    where = options.path or options.uri or options.type  # never the DSN: it holds a secret
    return Place(path, where, open_it, pipeline.name, options.keep_versions, look_at_it)
