"""Newline-delimited JSON, compiled: files to blocks of lines (`reader`), blocks to Arrow batches (`decode`)."""

from firnline.ndjson.decode import (
    BadRecord,
    Decoded,
    DecodeOptions,
    Decoder,
    MismatchError,
    UnexpectedFieldError,
    warm_up,
)
from firnline.ndjson.kinds import Choice, KindCounter, add_counts, choose, json_paths, settle
from firnline.ndjson.reader import (
    Block,
    BlockReader,
    BrokenFileError,
    Oversized,
    compression_of,
    open_blocks,
)
from firnline.ndjson.tree import shown_path

__all__ = [
    "BadRecord",
    "Block",
    "BlockReader",
    "BrokenFileError",
    "Choice",
    "DecodeOptions",
    "Decoded",
    "Decoder",
    "KindCounter",
    "MismatchError",
    "Oversized",
    "UnexpectedFieldError",
    "add_counts",
    "choose",
    "compression_of",
    "json_paths",
    "open_blocks",
    "settle",
    "shown_path",
    "warm_up",
]
