"""Newline-delimited JSON: files to blocks of lines (`reader`), blocks to Arrow batches (`decode`)."""

from firnline.ndjson.decode import (
    BadRecord,
    Decoded,
    DecodeOptions,
    Decoder,
    MismatchError,
    UnexpectedFieldError,
    infer_schema,
    warm_up,
)
from firnline.ndjson.reader import (
    Block,
    BlockReader,
    BrokenFileError,
    Oversized,
    compression_of,
    open_blocks,
)

__all__ = [
    "BadRecord",
    "Block",
    "BlockReader",
    "BrokenFileError",
    "DecodeOptions",
    "Decoded",
    "Decoder",
    "MismatchError",
    "Oversized",
    "UnexpectedFieldError",
    "compression_of",
    "infer_schema",
    "open_blocks",
    "warm_up",
]
